"""The doctor for a hang: who waits for whom, and where each process's threads are.

A launcher has a `Desk`, at which other processes of the same user can ask by ``hybridpar doctor
JOB``, where JOB is the launcher's process id. SIGUSR1 to the launcher has it print the same.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from hybridpar.errors import HybridParError
from hybridpar.launch.assignment import Status

_NAME = "hybridpar-job-"
_ANSWER_S = 15.0


class Desk:
    """Where someone may ask what a job's processes do.

    A socket in Linux's abstract namespace, so that no file is left of it; elsewhere only the signal
    is heard. One desk a process: a second job of the same process has none.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._signalled = False
        self._old_handler: Any = None

    def __enter__(self) -> Desk:
        if sys.platform == "linux":
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(f"\0{_NAME}{os.getpid()}")
                listener.listen(4)
                listener.setblocking(False)
                self._socket = listener
            except OSError:
                listener.close()
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:  # the user has none
            self._old_handler = signal.signal(signal.SIGUSR1, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._old_handler is not None:
            signal.signal(signal.SIGUSR1, self._old_handler)

    def handles(self) -> list[socket.socket]:
        """What becomes ready to read when someone asks."""
        return [] if self._socket is None else [self._socket]

    def asked(self) -> bool:
        """Whether someone has asked, by signal or at the desk, and waits for :meth:`answer`."""
        self._callers = self._accepted()
        return self._signalled or bool(self._callers)

    def answer(self, text: str) -> None:
        """Tell whoever has asked."""
        if self._signalled:
            self._signalled = False
            print(text, file=sys.stderr, flush=True)  # noqa: T201 - what was asked for
        for caller in self._callers:
            with caller, suppress(OSError):
                caller.settimeout(1.0)
                caller.sendall(text.encode())
        self._callers = []

    def _accepted(self) -> list[socket.socket]:
        callers = []
        while self._socket is not None:
            try:
                caller, _ = self._socket.accept()
            except OSError:  # nobody else
                break
            if _user_of(caller) in (0, os.getuid()):
                callers.append(caller)
            else:
                caller.close()
        return callers

    def _on_signal(self, _: int, __: FrameType | None) -> None:
        self._signalled = True

    _callers: list[socket.socket] = []  # noqa: RUF012 - replaced, never changed


def _user_of(caller: socket.socket) -> int:
    """The user id of a Unix socket's other end."""
    size = struct.calcsize("3i")
    credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    user: int = struct.unpack("3i", credentials)[1]
    return user


def ask(job: int) -> str:
    """What the processes of a job on this machine do.

    Args:
        job: the process id of its launcher.

    Raises:
        HybridParError: if there is no such job, or it does not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(f"\0{_NAME}{job}")
            return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()
        except OSError as error:
            known = ", ".join(map(str, jobs())) or "none"
            raise HybridParError(
                f"No job {job} answers on this machine ({error}). Running jobs: {known}. A job is "
                "named by the process id of the script that called launch."
            ) from error


def jobs() -> list[int]:
    """The jobs that run on this machine."""
    try:
        lines = Path("/proc/net/unix").read_text().splitlines()
    except OSError:
        return []
    names = {line.split()[-1] for line in lines}
    return sorted(int(n.rpartition("-")[2]) for n in names if n.startswith(f"@{_NAME}"))


def own_status(name: str, step: int | None, waits: list[str]) -> Status:
    """What this process does."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            lines = "".join(traceback.format_stack(frame))
            stacks.append(f"thread {names.get(ident, ident)}:\n{lines}")
    return Status(name=name, pid=os.getpid(), step=step, waits=waits, stacks=stacks)


def describe_all(names: Sequence[str], statuses: Mapping[str, Status]) -> str:
    """What all processes do, as text, each thread's stack included."""
    lines = ["hybridpar doctor: who waits for whom", *who_waits(names, statuses), ""]
    for name in names:
        if name in statuses:
            lines += [f"-- {name} --", *statuses[name].stacks]
    return "\n".join(lines)


def who_waits(names: Sequence[str], statuses: Mapping[str, Status]) -> list[str]:
    """A line a process: its step, and whom it waits for. Those that did not say are named."""
    lines = []
    for name in names:
        status = statuses.get(name)
        if status is None:
            lines.append(
                f"  {name}: does not answer. It has ended or is stopped, or computes without "
                "letting Python's other threads run."
            )
            continue
        where = "" if status.step is None else f", step {status.step}"
        what = "; ".join(status.waits) or "waits for no other process"
        lines.append(f"  {name} (process {status.pid}{where}): {what}")
    return lines
