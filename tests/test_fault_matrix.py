"""Every kind of process, failing in every way, at every time: one error, soon, and nothing left.

`injected` strikes; what follows is the real thing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import hybridpar as hp
import struck
from hybridpar import cli
from hybridpar.checkpoint.folders import checkpoints
from hybridpar.launch.doctor import jobs

pytestmark = pytest.mark.slow

ROLES = hp.Roles(trainers=2, servers=2)
WITHIN_S = 10.0
WORDS = {
    "raise": "ArithmeticError: struck",
    "exit": "SystemExit: 3",
    "memory": "memory",
    "kill": "SIGKILL",
    "stop": "hangs: it has been stopped",
}
NAMES = ("trainer1", "ps1", "master")
WHEN = ("start", "first", "mid", "shutdown")


def left() -> set[str]:
    """What a job could leave that no guard of the suite sees."""
    files = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    return files | {str(path) for path in Path(tempfile.gettempdir()).iterdir()}


@pytest.mark.parametrize("how", WORDS)
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", NAMES)
def test_a_failure_is_named_soon_and_leaves_nothing(
    name: str, when: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "struck"
    monkeypatch.setenv("HYBRIDPAR_TEST_FAULT", f"{name} {when} {how} {mark}")
    before = left()
    # The master is in a step only where no server calls the roll.
    consistency = "async" if name == "master" else "sync"
    with pytest.raises(hp.WorkerError) as caught:
        hp.launch(struck.train, roles=ROLES, args=(consistency,))
    assert time.monotonic() - float(mark.read_text()) < WITHIN_S
    error = caught.value
    assert error.role + ("" if error.role == "master" else str(error.rank)) == name
    assert WORDS[how] in str(error)
    assert error.host
    if how in ("raise", "exit", "memory"):
        assert "in strike" in error.remote_traceback
    if when == "mid":
        assert error.step in (4, 5, 6), "the step is known, if only from the others"
    assert left() <= before
    assert not jobs()


@pytest.mark.parametrize("how", WORDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_failure_while_a_checkpoint_is_written(
    name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, directory = tmp_path / "struck", tmp_path / "checkpoints"
    when = "mid" if name == "master" else "save"  # every step saves, and it has no part in that
    monkeypatch.setenv("HYBRIDPAR_TEST_FAULT", f"{name} {when} {how} {mark}")
    consistency = "async" if name == "master" else "sync"
    with pytest.raises(hp.WorkerError) as caught:
        hp.launch(struck.train, roles=ROLES, args=(consistency, str(directory)))
    assert time.monotonic() - float(mark.read_text()) < WITHIN_S
    error = caught.value
    assert error.role + ("" if error.role == "master" else str(error.rank)) == name
    assert WORDS[how] in str(error)
    for folder in checkpoints(directory):
        assert cli.main(["checkpoint", "verify", str(folder)]) == 0


SCRIPT = """
import multiprocessing, sys
from multiprocessing import forkserver
import hybridpar as hp
import struck
if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hybridpar", "torch._dynamo", "struck", "strict_warnings"])
    forkserver.ensure_running()
    hp.launch(struck.train, roles=hp.Roles(trainers=2, servers=2), args=(sys.argv[1],))
"""


@pytest.mark.parametrize("how", WORDS)
@pytest.mark.parametrize("name", NAMES)
def test_the_terminal_shows_the_cause_once_and_last(name: str, how: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        "HYBRIDPAR_TEST_FAULT": f"{name} mid {how} {tmp_path / 'struck'}",
    }
    done = subprocess.run(
        [sys.executable, "script.py", "async" if name == "master" else "sync"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    cause = [number for number, line in enumerate(lines) if line.startswith("hybridpar.")]
    assert len(cause) == 1, done.stderr
    assert name in lines[cause[0]]
    assert WORDS[how] in lines[cause[0]]
    rest = "\n".join(lines[cause[0] :])
    assert rest.count("Traceback") <= 1, "its own, once"
    for word in ("eof", "leaked", "Broken pipe", "TCPStore", "connection to", "destroy_process"):
        assert word.lower() not in done.stderr.lower(), done.stderr
