"""The command line, run as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from hybridpar import cli


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from hybridpar.cli import main; raise SystemExit(main())"]
    return subprocess.run([*command, *args], capture_output=True, text=True, timeout=90)


def test_demo_says_who_is_who_and_trains() -> None:
    done = run("demo", "--epochs", "3", "--trainers", "3", "--servers", "2")
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("master", "ps0", "ps1", "trainer0", "trainer1", "trainer2"):
        assert re.search(rf"^{name} is process \d+", done.stdout, re.MULTILINE)
    for epoch in range(3):
        assert f"Training done for epoch {epoch}\n" in done.stdout
    assert re.search(r"loss: \d\.\d+ at the start, \d\.\d+ over the last epoch", done.stdout)
    assert re.search(r"\d+ steps/s \(30 steps on each of 3 trainers\)", done.stdout)


def test_demo_learns_what_it_can_and_repeats_itself() -> None:
    """Labels are random, so only the seen batches' frequencies can be learnt; seeds repeat."""
    losses = [
        re.search(r"loss: .*", run("demo", "--epochs", "2", "--seed", "7").stdout)[0]
        for _ in range(2)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("args", [["demo", "--trainers", "0"], ["nonsense"], []])
def test_bad_arguments(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    assert caught.value.code == 2
    assert "usage: hybridpar" in capsys.readouterr().err


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["demo", "--help"])
    out = capsys.readouterr().out
    assert "example: hybridpar demo" in out
    for option in ("trainers", "servers", "epochs", "num-embeddings", "embedding-dim", "seed"):
        assert f"--{option}" in out
