"""Logs of every process in files, and how quiet it is without them."""

from __future__ import annotations

import logging
import re
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

import hybridpar as hp
import watched
from hosts import Torchrun, torchruns
from hybridpar.launch.logs import LogSettings, logged

TWO = hp.Roles(trainers=2, servers=1)
LINE = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) (\w+) +(trainer\d|ps\d|master): (.*)", re.ASCII
)


def lines_of(path: Path) -> list[tuple[str, str]]:
    """Level and text of each line; all have a time and the role whose file it is."""
    found = []
    for line in path.read_text().splitlines():
        match = LINE.fullmatch(line)
        assert match, line
        assert match[3] == path.stem
        found.append((match[2], match[4]))
    return found


@pytest.mark.parametrize("own_handler", [False, True])
def test_each_process_has_a_log(tmp_path: Path, own_handler: bool) -> None:
    folder = tmp_path / "new" / "logs"
    hp.launch(watched.chatter, roles=TWO, args=(own_handler,), log_dir=folder)
    names = ["master.log", "ps0.log", "trainer0.log", "trainer1.log"]
    assert sorted(path.name for path in folder.iterdir()) == names
    for rank in range(2):
        lines = lines_of(folder / f"trainer{rank}.log")
        assert lines[0][1].startswith(f"trainer{rank} is process ")
        said = lines[1:]
        own = ("stderr", "mine: of hybridpar") if own_handler else ("INFO", "of hybridpar")
        mine = "mine: of mine" if own_handler else "of mine"
        assert said[:6] == [
            ("stdout", "hello world"), ("stderr", "two"), ("stderr", "lines"),
            ("stderr", "all of it"), own, ("stderr", mine),
        ]  # fmt: skip
        assert said[-1] == ("stdout", "no end")
    for name in ("master", "ps0"):
        assert lines_of(folder / f"{name}.log")[-1] == ("INFO", f"{name} is done")


@pytest.mark.parametrize("kills", [True, False])
def test_the_log_of_a_failure_is_whole(tmp_path: Path, kills: bool) -> None:
    with pytest.raises(hp.WorkerError) as caught:
        hp.launch(watched.failing, roles=TWO, args=(str(tmp_path), kills), log_dir=tmp_path)
    assert caught.value.exitcode == (-signal.SIGKILL if kills else None)
    lines = lines_of(tmp_path / "trainer1.log")
    if kills:
        assert lines[-1] == ("stdout", "an unfinished line, finished")
    else:
        assert ("ERROR", "ZeroDivisionError: the data are bad") in lines
        assert lines[-1] == ("stdout", "an unfinished line")
    assert ("INFO", "model 1 is placed:") in lines_of(tmp_path / "master.log")
    assert any("ps0 holds model 1: " in text for _, text in lines_of(tmp_path / "ps0.log"))


def test_a_restart_adds_to_the_logs(tmp_path: Path) -> None:
    hp.launch(watched.resumed, roles=TWO, args=(str(tmp_path),), max_restarts=1, log_dir=tmp_path)
    (tmp_path / "stale.log").touch()
    begun = [text for _, text in lines_of(tmp_path / "trainer0.log") if " is process " in text]
    assert [text.rpartition(", ")[2] for text in begun] == ["attempt 0", "attempt 1"]


def test_the_level_is_that_of_the_logger(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    logger = logging.getLogger("hybridpar")
    for level, wanted in ((logging.NOTSET, False), (logging.DEBUG, True)):
        logger.setLevel(level)
        settings = LogSettings.checked(tmp_path)
        logger.setLevel(logging.NOTSET)
        with logged(settings, "ps0", 0):
            logger.debug("in detail")
        assert ("in detail" in (tmp_path / "ps0.log").read_text()) == wanted
    assert logger.level == logging.NOTSET
    assert [type(handler) for handler in logger.handlers] == [logging.NullHandler]
    assert capsys.readouterr() == ("", "")


def test_it_is_quiet_by_default(capfd: pytest.CaptureFixture) -> None:
    logging.getLogger("hybridpar").warning("nobody asked")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("wrong", [7, __file__])
def test_folders_that_are_refused(wrong: object) -> None:
    with pytest.raises(hp.SpecError, match="log_dir"):
        hp.RoleLauncher(TWO, log_dir=wrong)


@pytest.mark.slow
def test_logs_under_torchrun(tmp_path: Path) -> None:
    def alone(folder: Path) -> Torchrun:
        options = ("--standalone", "--nproc-per-node=4")
        logs = str(folder / "logs")
        return Torchrun(folder / "log", options, ("chatter", str(folder)), LOG_DIR=logs)

    with torchruns([partial(alone, tmp_path)]) as (run,):
        output = run.wait()
    assert run.process.returncode == 0, output
    for name in ("master", "ps0", "trainer0", "trainer1"):
        lines = lines_of(tmp_path / "logs" / f"{name}.log")
        assert f"{name} is process " in lines[0][1]
        assert (("stdout", "hello world") in lines) == name.startswith("trainer")
    assert torch.load(tmp_path / "rank0.pt", weights_only=False)
