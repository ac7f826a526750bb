"""The progress bar on a real terminal, and plain lines where there is none."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
import torch

import hybridpar as hp
import watched
from hybridpar import callbacks
from hybridpar.callbacks import progress_bar
from hybridpar.callbacks.chosen import chosen

SCRIPT = """
import hybridpar as hp, sys, watched
if __name__ == "__main__":
    print("hello")
    hp.launch(watched.shown, roles=hp.Roles(trainers=2, servers=1), args=(None, None))
"""


def on_a_terminal(script: str, columns: int = 150) -> str:
    """What a script draws on a terminal; ends with it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    drawn, limit = b"", time.monotonic() + 60
    try:
        while time.monotonic() < limit:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    piece = os.read(ours, 65536)
                except OSError:  # the last process has closed it
                    break
                drawn += piece
                if not piece:
                    break
        assert process.wait(timeout=10) == 0, drawn.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return drawn.decode()


def test_one_bar_on_a_terminal() -> None:
    drawn = on_a_terminal(SCRIPT)
    lines = [line for line in re.split(r"\r?\n", drawn) if line]
    assert lines[0].strip() == "hello"
    assert len(lines) == 2, "one bar, drawn in one line over and over"
    last = lines[1].split("\r")[-1]
    for words in (
        r"epoch 2/2: 100%\|█{10}\|",
        r"300/300 \[\d\d:\d\d<00:00", r"[\d.]+ steps/s", r"loss \d\.\d+",
        r"[\d,]+ samples/s", r"\d+% waiting", r"staleness \d",
    ):  # fmt: skip
        assert re.search(words, last), (words, last)
    assert "epoch 1/2:   0%|" in lines[1]


def test_plain_lines_without_a_terminal() -> None:
    cases = [(None, None), (True, None), (None, 0.03)]
    results = hp.launch(watched.written, roles=hp.Roles(trainers=2, servers=1), args=(cases,))
    assert results[1] == ["", "", ""], "trainer 0 alone writes"
    unasked, asked, often = (text.splitlines() for text in results[0])
    assert unasked == []
    assert len(asked) == 1
    assert len(often) > 2
    pattern = (
        r"epoch [12]/2, step \d+ of 30: loss \d(\.\d+)?, [\d,]+ samples/s, [\d.]+ steps/s, "
        r"\d+% waiting, (staleness [\d.]+, )?\d+:\d\d left"
    )
    for line in asked + often:
        assert re.fullmatch(pattern, line), line
    for lines in (asked, often):
        assert lines[-1].startswith("epoch 2/2, step 30 of 30: ")


def test_a_line_on_an_evaluation_and_the_time_left(capsys, monkeypatch) -> None:
    clock = iter(range(0, 1000, 100))
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: float(next(clock)))
    bar = callbacks.ProgressBar()
    bar.on_start(callbacks.Run(rank=0, num_trainers=1, num_servers=1, epochs=2, steps_an_epoch=4))
    bar.on_step(callbacks.Step(  # after 100 s, most of them an evaluation's
        step=1, epoch=0, step_in_epoch=1, steps_an_epoch=4, num_trainers=1,
        loss_tensor=torch.tensor(0.5), samples=4, seconds=0.1, waiting=0.0,
    ))  # fmt: skip
    bar.on_evaluation(hp.Evaluation(step=4, epoch=1, results={"auc": 0.75}))
    shown, evaluated = capsys.readouterr().err.splitlines()
    assert shown.endswith("23:20 left"), "seven steps of 200 s, as the clock was looked at twice"
    assert evaluated == "epoch 1/2, step 4: auc 0.75"


class Terminal:
    def isatty(self) -> bool:
        return True


def test_who_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def kinds(progress: bool | None, *given: callbacks.Callback) -> list[str]:
        return [type(callback).__name__ for callback in chosen(given, progress, None)]

    assert kinds(None) == []
    assert kinds(True) == ["ProgressBar"]
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert kinds(None) == ["ProgressBar"]
    assert kinds(False) == []
    own = callbacks.ProgressBar()
    assert kinds(None, own) == kinds(True, own) == ["ProgressBar"]
    monkeypatch.setattr(progress_bar.importlib.util, "find_spec", lambda name: None)
    assert kinds(None) == ["ProgressBar"], "plain lines"
    with pytest.raises(hp.SpecError, match=r"pip install 'hybridpar\[progress\]'"):
        kinds(True)
    with pytest.raises(hp.SpecError, match=r"pip install 'hybridpar\[tensorboard\]'"):
        callbacks.TensorBoard("events")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((callbacks.JSONL("x"), None, None), "Give a list of callbacks"),
        (([callbacks.JSONL], None, None), r"Make an object of it: add \(\)"),
        ((["x"], None, None), "no hybridpar.callbacks.Callback"),
        (([], "yes", None), "progress is 'yes'"),
        (([], None, True), "report is True"),
    ],
)
def test_what_is_refused(options: tuple[object, ...], message: str) -> None:
    with pytest.raises(hp.SpecError, match=message):
        chosen(*options)
