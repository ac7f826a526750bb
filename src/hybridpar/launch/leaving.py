"""How a process that torchrun started leaves: its interpreter ends, unlike a worker's of ours."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hybridpar.errors import WorkerError

_SHUTDOWN_S = 10.0


def keep_process_groups() -> None:
    """See to it that no process group of this process is ever destroyed.

    Where the last reference to a gloo group goes, its threads are joined while holding the GIL that
    they may need: a deadlock now and then (torch 2.13), at the latest when the interpreter ends. A
    reference that nobody owns keeps the group until the process is gone.
    """
    for group in distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def forget_process_groups() -> None:
    """Let torch forget its groups, so that the next launch can make new ones."""
    if dist.is_initialized():
        dist.destroy_process_group()


def leave_abruptly() -> None:
    """After a failure, have this process end without finalizing its interpreter, with status 1.

    Its other threads may still be inside a library's call; finalization would end them there, which
    aborts the process in C++ now and then. What else is registered to run at exit does run first.
    """
    atexit.register(_leave)


def _leave() -> None:
    atexit.unregister(_leave)
    with suppress(OSError, ValueError, AttributeError):  # stderr is not a file
        faulthandler.dump_traceback_later(_SHUTDOWN_S, exit=True)
    atexit._run_exitfuncs()
    _flush()
    os._exit(1)


@contextmanager
def sigterm_noted() -> Iterator[list[float]]:
    """Within it, SIGTERM does not end this process, but adds the time when it came to the list.

    When a process dies, its torchrun ends all others of its host within a tenth of a second: too
    soon for the master to tell the other hosts who was first.
    """
    times: list[float] = []
    try:
        before = signal.signal(signal.SIGTERM, lambda *_: times.append(time.monotonic()))
    except ValueError:  # not the main thread
        yield times
        return
    try:
        yield times
    finally:
        signal.signal(signal.SIGTERM, before)


def end_now(error: WorkerError) -> NoReturn:
    """End this process as an uncaught exception would, from a thread that is not its main one."""
    with suppress(Exception):  # whatever a hook of the user's does
        sys.excepthook(type(error), error, error.__traceback__)
    _flush()
    os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
