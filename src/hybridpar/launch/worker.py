"""What a started process does: take up its role, play it, and tell the launcher how it went."""

from __future__ import annotations

import datetime
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from hybridpar.errors import (
    PeerLostError,
    RemoteError,
    TrainFunctionError,
    WaitTimeoutError,
    describe,
)
from hybridpar.launch.assignment import Assignment, Report, Status
from hybridpar.launch.doctor import own_status
from hybridpar.launch.rendezvous import connect, connect_servers, listen, open_store
from hybridpar.launch.train_function import unpickled_work
from hybridpar.master import Master
from hybridpar.server.parameter_server import ParameterServer
from hybridpar.trainer.context import TrainerContext
from hybridpar.transport import Handler
from hybridpar.waits import waits

ASK_STATUS = b"status"  # what the launcher sends for a `Status`


def main(assignment: Assignment, launcher: Connection, store_socket: socket.socket | None) -> None:
    """Play one role to its end. Never returns: the process ends here.

    Interpreter shutdown would destroy gloo's process group while holding the GIL that its threads
    need in order to end: a deadlock now and then (torch 2.13), so the process leaves by os._exit.
    """
    _settle_in(assignment)
    where = _Where()
    line = _Line(launcher)
    threading.Thread(target=_heed, args=(line, assignment.name, where), daemon=True).start()
    try:
        result = _play(assignment, store_socket, where)
        report = Report(host=socket.gethostname(), step=where.step, result=result)
    except BaseException as error:  # noqa: BLE001 - SystemExit in a train function is a failure too
        report = _report(assignment.name, error, where.step)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a closed stream must not cost the report
            stream.flush()
    line.send(report)
    os._exit(1 if report.cause else 0)


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


def _heed(line: _Line, name: str, where: _Where) -> None:
    """Say what this process does when the launcher asks; end with it when its pipe closes."""
    try:
        while line.receive() == ASK_STATUS:
            line.send(own_status(name, where.step, waits()))
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


class _Where:
    """Lets reports name the step that this process is in."""

    context: TrainerContext | None = None

    @property
    def step(self) -> int | None:
        return None if self.context is None else self.context.step


def _play(
    assignment: Assignment, store_socket: socket.socket | None, where: _Where
) -> bytes | None:
    store = open_store(assignment, store_socket)
    if assignment.role == "master":
        _play_master(assignment, store)
    elif assignment.role == "ps":
        _play_server(assignment, store)
    else:
        return _play_trainer(assignment, store, where)
    return None


def _play_master(assignment: Assignment, store: Store) -> None:
    master = Master(
        assignment.roles.trainers,
        lambda: connect_servers(assignment, store),
        assignment.timeout_s,
    )
    vain = _VainWait()
    listen(assignment, store, vain.noted(master.handle), master.lose)
    threading.Thread(target=vain.until, args=(master.wait_until_finished,), daemon=True).start()
    vain.wait()


def _play_server(assignment: Assignment, store: Store) -> None:
    server = ParameterServer(assignment.name, assignment.timeout_s)
    vain = _VainWait()
    listen(assignment, store, vain.noted(server.handle), server.lose)
    # For as long as the job runs: the launcher ends it if the master dies.
    threading.Thread(target=vain.until, args=(server.stopped.wait,), daemon=True).start()
    vain.wait()


class _VainWait:
    """Ends a server or the master, saying why, when one of its calls has waited in vain.

    It knows who was missing. The trainers may be in an all-reduce, and hear its answer much later.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None

    def noted(self, handler: Handler) -> Handler:
        """A handler whose vain waits are noted."""

        def handle(peer: str, method: str, args: tuple[Any, ...]) -> object:
            try:
                return handler(peer, method, args)
            except WaitTimeoutError as error:
                self._end(error)
                raise

        return handle

    def until(self, done: Callable[[], object]) -> None:
        """End well when ``done`` returns, on a thread of its own; badly if it raises."""
        try:
            done()
            self._end(None)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self._end(error)

    def wait(self) -> None:
        """Wait for the end."""
        self._over.wait()
        if self._error is not None:
            raise self._error

    def _end(self, error: BaseException | None) -> None:
        if not self._over.is_set():
            self._error = error
            self._over.set()


def _play_trainer(assignment: Assignment, store: Store, where: _Where) -> bytes:
    device = _device(assignment)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("trainers", store),
        rank=assignment.rank,
        world_size=assignment.roles.trainers,
        # Longer than servers and master wait for whoever is missing, whom they can name.
        timeout=datetime.timedelta(seconds=assignment.timeout_s + 10),
    )
    master = connect(assignment, store, "master")
    servers = connect_servers(assignment, store)
    where.context = context = TrainerContext(
        rank=assignment.rank,
        num_trainers=assignment.roles.trainers,
        device=device,
        master=master,
        servers=servers,
        shares_memory=assignment.share_memory,
        attempt=assignment.attempt,
    )
    train, args = unpickled_work(assignment.name, assignment.work)
    result = _pickled_result(assignment.name, train(context, *args))
    for server in servers:
        server.settle()  # the last pushes of a loop by hand
        server.close()
    # The others may train for long yet.
    master.send("finish", assignment.rank).wait(patiently=True)
    master.close()
    return result


def _pickled_result(name: str, result: object) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TrainFunctionError(
            f"The train function on {name} returned a {type(result).__name__} that cannot be "
            f"pickled ({error}). Return plain values and tensors."
        ) from error


def _device(assignment: Assignment) -> torch.device:
    if assignment.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", assignment.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _report(name: str, error: BaseException, step: int | None) -> Report:
    origin, cause, remote = name, f"raised {describe(error)}", ""
    if isinstance(error, RemoteError):
        origin, cause, remote = error.origin, f"raised {error.cause}", error.remote_traceback
    return Report(
        host=socket.gethostname(),
        step=step,
        cause=cause,
        remote_traceback=remote or _traceback_of(error),
        origin=origin,
        consequence=_is_consequence(error),
        waited=isinstance(error, WaitTimeoutError) or _is_gloo(error, "imed out"),
    )


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - its __str__ may raise
        return "".join(traceback.format_tb(error.__traceback__))


def _is_consequence(error: BaseException) -> bool:
    """Whether an exception, or one behind it, tells of another process's end."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, (PeerLostError, WaitTimeoutError, DistError)):
            return True
        if _is_gloo(current):
            return True
        current = current.__cause__ or current.__context__
    return False


def _is_gloo(error: BaseException, words: str = "") -> bool:
    """Whether gloo raised it: a plain RuntimeError that begins with its own source file's name."""
    text = describe(error) if isinstance(error, RuntimeError) else ""
    return "/gloo/" in text and words in text
