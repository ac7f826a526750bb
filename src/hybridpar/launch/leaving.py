"""How a process that torchrun started leaves: its interpreter ends, unlike a worker's of ours."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import sys
from contextlib import suppress
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


def bound_shutdown() -> None:
    """After a failure, end this process if its interpreter does not manage to in ten seconds.

    Its threads may still be inside a library's call.
    """
    with suppress(OSError, ValueError, AttributeError):  # stderr is not a file
        sys.stderr.fileno()
        atexit.register(faulthandler.dump_traceback_later, _SHUTDOWN_S, exit=True)


def end_now(error: WorkerError) -> NoReturn:
    """End this process as an uncaught exception would, from a thread that is not its main one."""
    with suppress(Exception):  # whatever a hook of the user's does
        sys.excepthook(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(1)
