"""What a started process does: take up its role, play it, and tell the launcher how it went."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from hybridpar.launch.assignment import Assignment, Report, Status
from hybridpar.launch.doctor import own_status
from hybridpar.launch.logs import logged
from hybridpar.launch.playing import Where, play
from hybridpar.launch.rendezvous import open_store
from hybridpar.launch.reports import report_of
from hybridpar.waits import waits

_logger = logging.getLogger("hybridpar")
ASK_STATUS = b"status"  # what the launcher sends for a `Status`


def main(assignment: Assignment, launcher: Connection, store_socket: socket.socket | None) -> None:
    """Play one role to its end. Never returns: the process ends here.

    Interpreter shutdown would destroy gloo's process group while holding the GIL that its threads
    need in order to end: a deadlock now and then (torch 2.13), so the process leaves by os._exit.
    """
    _settle_in(assignment)
    where = Where()
    line = _Line(launcher)
    threading.Thread(target=_heed, args=(line, assignment.name, where), daemon=True).start()
    with logged(assignment.logs, assignment.name, assignment.attempt):
        report = _play(assignment, store_socket, where)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a closed stream must not cost the report
            stream.flush()
    line.send(report)
    os._exit(1 if report.cause else 0)


def _play(assignment: Assignment, store_socket: socket.socket | None, where: Where) -> Report:
    """Play the role, and report how it went."""
    try:
        result = play(assignment, open_store(assignment, store_socket), where)
    except BaseException as error:  # noqa: BLE001 - SystemExit in a train function is a failure too
        report = report_of(assignment.name, error, where.step)
        _logger.error("%s %s\n%s", assignment.name, report.cause, report.remote_traceback)
        return report
    _logger.info("%s is done", assignment.name)
    return Report(host=socket.gethostname(), step=where.step, result=result)


def _settle_in(assignment: Assignment) -> None:
    """Make this process what it would be if it had been started by hand."""
    os.setpgid(0, 0)  # the launcher ends the group, a DataLoader's workers included
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher hears Ctrl-C and ends the job
    os.environ.clear()
    os.environ.update(assignment.environment)
    if assignment.host == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    torch.set_num_threads(assignment.num_threads)
    torch.seed()  # processes forked from one server would draw the same numbers


class _Line:
    """The pipe to the launcher, for two threads."""

    def __init__(self, launcher: Connection) -> None:
        self._launcher = launcher
        self._lock = threading.Lock()

    def send(self, message: Report | Status) -> None:
        with self._lock:
            self._launcher.send_bytes(pickle.dumps(message))

    def receive(self) -> bytes:
        return self._launcher.recv_bytes()


def _heed(line: _Line, name: str, where: Where) -> None:
    """Say what this process does when the launcher asks; end with it when its pipe closes."""
    try:
        while line.receive() == ASK_STATUS:
            line.send(own_status(name, where.step, waits()))
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)
