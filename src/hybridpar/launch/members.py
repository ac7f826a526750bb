"""`Member`: a process of the job as the launcher holds it: started, heard, and ended."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

from hybridpar.launch import worker
from hybridpar.launch.assignment import Assignment, Report, Status

_logger = logging.getLogger("hybridpar")
_TERM_S = 1.0  # how long a process may take to end after SIGTERM


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the job, as the launcher holds it."""

    assignment: Assignment
    process: BaseProcess
    pipe: Connection

    @property
    def name(self) -> str:
        """The process's name."""
        return self.assignment.name

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self.process.pid is not None
        return self.process.pid

    def receive(self) -> Report | Status | None:
        """What the process has sent; None if it has ended without a report."""
        try:
            if not self.pipe.poll():  # a child of its own may hold the pipe open: no end of file
                raise EOFError
            message = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(_TERM_S)
            return None
        assert isinstance(message, (Report, Status))
        return message

    def ask_status(self) -> None:
        """Ask for a `Status`, which will come by the pipe if the process can still answer."""
        with suppress(OSError):
            self.pipe.send_bytes(worker.ASK_STATUS)


def start(
    context: BaseContext, assignment: Assignment, store_socket: socket.socket | None
) -> Member:
    """Start a process; the master gets the socket that the store is to be served on."""
    ours, theirs = context.Pipe()
    process = context.Process(  # type: ignore[attr-defined]
        target=worker.main, args=(assignment, theirs, store_socket), name=assignment.name
    )
    process.start()
    theirs.close()
    _logger.info("%s is process %d on this machine", assignment.name, process.pid)
    return Member(assignment, process, ours)


def end_all(members: Sequence[Member]) -> None:
    """End every process and whatever it started: those still running are asked, then killed."""
    for signal_number, wait_s in ((0, 0.0), (signal.SIGTERM, _TERM_S), (signal.SIGKILL, 10.0)):
        limit = time.monotonic() + wait_s
        for member in members:
            if signal_number and member.process.is_alive():
                _signal_group(member.process, signal_number)
        for member in members:
            member.process.join(max(0.0, limit - time.monotonic()))
    for member in members:
        _signal_group(member.process, signal.SIGKILL)  # what a process left behind
        member.pipe.close()
        member.process.close()


def _signal_group(process: BaseProcess, signal_number: int) -> None:
    assert process.pid is not None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal_number)
        return
    if process.is_alive():  # it has not made its own group yet
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal_number)
