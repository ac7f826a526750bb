"""The command line, run as a user runs it."""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hybridpar as hp
from hosts import wait_for
from hybridpar import cli
from warm_scripts import run_command

COMMAND = [sys.executable, "-c", "from hybridpar.cli import main; raise SystemExit(main())"]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=90)


def test_demo_says_who_is_who_and_trains() -> None:
    done = run_command("demo", "--epochs", "3", "--trainers", "3", "--servers", "2")
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
        re.search(r"loss: .*", run_command("demo", "--epochs", "2", "--seed", "7").stdout)[0]
        for _ in range(2)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("args", [["demo", "--trainers", "0"], ["nonsense"], []])
def test_bad_arguments(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    assert caught.value.code == 2
    assert "usage: hybridpar" in capsys.readouterr().err


SCRIPT = """
import os, sys, time
import hybridpar as hp

def train(ctx, what):
    print(f"{ctx.name} of {ctx.num_trainers}, {ctx.num_servers} servers", flush=True)
    if what == "fail" and ctx.rank == 1:
        raise ValueError("as asked")
    if what == "sleep":
        open(f"pid{ctx.rank}", "w").write(str(os.getpid()))
        time.sleep(600)

if __name__ == "__main__":
    hp.launch(train, roles=hp.Roles(trainers=1, servers=1), args=sys.argv[1:])
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_script.py").write_text(SCRIPT)
    return tmp_path


def test_run_takes_the_roles_and_ends_with_one_error(script: Path) -> None:
    options = ["--trainers=2", "--servers=3", "--log-dir=logs"]
    done = run("run", *options, "--module", "a_script", "fail")
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == [f"trainer{n} of 2, 3 servers" for n in range(2)]
    assert done.stderr.startswith("Traceback")
    assert done.stderr.count("WorkerError: trainer1") == 1
    assert done.stderr.rstrip().endswith("ValueError: as asked")
    names = ["master", "ps0", "ps1", "ps2", "trainer0", "trainer1"]
    assert sorted(path.stem for path in Path("logs").iterdir()) == names
    assert "trainer1: trainer1 of 2, 3 servers\n" in Path("logs/trainer1.log").read_text()


def test_the_status_of_run_is_the_scripts(script: Path) -> None:
    Path("quits.py").write_text("import sys; print(sys.argv); sys.exit(7)")
    done = run("run", "--servers", "1", "quits.py", "--trainers", "x")
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == "['quits.py', '--trainers', 'x']\n"


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_a_signal_to_run_ends_the_job(script: Path, number: signal.Signals) -> None:
    command = [*COMMAND, "run", "--trainers", "2", "a_script.py", "sleep"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        pids = [script / "pid0", script / "pid1"]
        wait_for(lambda: all(path.exists() and path.read_text() for path in pids), "training")
        job.send_signal(number)
        assert job.wait(30) == -number
    for path in pids:
        wait_for(lambda path=path: not _is_alive(int(path.read_text())), "the trainers' end")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("trainers", "servers", "given", "roles"),
    [
        (None, None, {"trainer": 2}, (2, 1)),
        ("3", None, {"trainer": 2, "ps": 2}, (3, 2)),
        (None, "3", {"trainer": 2}, (2, 3)),
        ("3", None, None, (3, 1)),
        (None, "3", None, "No roles are given"),
        ("x", None, None, "HYBRIDPAR_TRAINERS is 'x'"),
        ("0", None, None, "trainers=0"),
    ],
)
def test_roles_from_the_environment(
    trainers: str | None, servers: str | None, given: Any, roles: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in (("HYBRIDPAR_TRAINERS", trainers), ("HYBRIDPAR_SERVERS", servers)):
        if value is not None:
            monkeypatch.setenv(name, value)
    if isinstance(roles, str):
        with pytest.raises(hp.SpecError, match=roles):
            hp.RoleLauncher(given)
    else:
        launcher = hp.RoleLauncher(given)
        assert (launcher.roles.trainers, launcher.roles.servers) == roles


def test_run_without_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "gone.py"]) == 1
    assert "There is no script gone.py" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("hybridpar", "doctor", "trainers", "completion"))


def test_completion_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 1
    assert "pip install 'hybridpar[completion]'" in capsys.readouterr().err


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


@pytest.mark.parametrize("parser", list(parsers(cli.parser())), ids=lambda parser: parser.prog)
def test_every_help_shows_an_example(parser: argparse.ArgumentParser) -> None:
    text = parser.format_help()
    assert f"example: {parser.prog} " in text
    for action in parser._actions:
        assert action.help or action.metavar or action.choices, f"{action} says nothing"
