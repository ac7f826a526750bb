"""What a process prints, to a file of its own."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

LOG_DIRECTORY = "HYBRIDPAR_LOG_DIR"


def redirect(name: str) -> None:
    """Send this process's standard output and error to its own file, if the environment says so.

    Args:
        name: the process's name; the file is ``trainer0.log``, say. A job that is started anew, or
            a second one, goes on at its end.
    """
    folder = os.environ.get(LOG_DIRECTORY)
    if not folder:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / f"{name}.log"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a process that is killed flushes nothing
    for descriptor in (1, 2):  # what is printed from C++ too
        os.dup2(file, descriptor)
    os.close(file)
