"""Runs a script as ``python script.py`` does, but from a process that has torch loaded already.

A script that launches a job would else load torch twice: for itself, and in its forkserver.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import util
from pathlib import Path


def run_script(
    script: Path, *arguments: object, cwd: Path | None = None, timeout_s: float = 90.0
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end.

    Args:
        script: its file.
        *arguments: what it finds in ``sys.argv``.
        cwd: the working directory; None takes this process's.
        timeout_s: how long it may take; then it is killed.
    """
    argv = [str(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        process = multiprocessing.get_context("forkserver").Process(
            target=_play, args=(argv, str(cwd or Path.cwd()), [str(file) for file in files])
        )
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
        code = process.exitcode or 0
        process.close()
        return subprocess.CompletedProcess(argv, code, *[file.read_text() for file in files])


def run_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ``hybridpar`` with arguments."""
    return run_script(Path(__file__).parent / "hybridpar_command.py", *arguments)


def _play(argv: list[str], cwd: str, files: list[str]) -> None:
    for number, file in enumerate(files, start=1):
        with open(file, "wb") as opened:
            os.dup2(opened.fileno(), number)
    os.chdir(cwd)
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(argv[0]))
    util.spawnv_passfds = _fork_forkserver  # type: ignore[assignment]
    runpy.run_path(argv[0], run_name="__main__")
    sys.stdout.flush()


def _fork_forkserver(_: bytes, args: Sequence[str], kept: Sequence[int]) -> int:
    """In place of starting ``python -c "<a forkserver's main>"``: fork, and do that."""
    pid = os.fork()
    if pid == 0:
        try:
            for name in map(int, os.listdir("/proc/self/fd")):
                if name > 2 and name not in kept:  # its parent's end, which it waits for, too
                    with suppress(OSError):  # the listing itself is closed by now
                        os.close(name)
            exec(args[-1], {})
        finally:
            os._exit(0)
    return pid
