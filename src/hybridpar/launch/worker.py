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
from contextlib import closing, suppress
from multiprocessing.connection import Connection

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
from hybridpar.launch.assignment import Assignment, Report
from hybridpar.launch.rendezvous import connect, connect_servers, listen, open_store
from hybridpar.master import Master
from hybridpar.server.parameter_server import ParameterServer
from hybridpar.trainer.context import TrainerContext


def main(assignment: Assignment, launcher: Connection, store_socket: socket.socket | None) -> None:
    """Play one role to its end. Never returns: the process ends here.

    Interpreter shutdown would destroy gloo's process group while holding the GIL that its threads
    need in order to end: a deadlock now and then (torch 2.13), so the process leaves by os._exit.
    """
    _settle_in(assignment)
    threading.Thread(target=_die_with, args=(launcher,), daemon=True).start()
    where = Where()
    try:
        result = play(assignment, open_store(assignment, store_socket), where)
        report = Report(host=socket.gethostname(), step=where.step, result=result)
    except BaseException as error:  # noqa: BLE001 - SystemExit in a train function is a failure too
        report = report_of(assignment.name, error, where.step)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a closed stream must not cost the report
            stream.flush()
    launcher.send_bytes(pickle.dumps(report))
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


def _die_with(launcher: Connection) -> None:
    """End this process and its children when the launcher's end of the pipe closes."""
    try:
        launcher.recv_bytes()
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


class Where:
    """Lets the report name the step that a failure happened in."""

    context: TrainerContext | None = None

    @property
    def step(self) -> int | None:
        """The step; None before the first."""
        return None if self.context is None else self.context.step


def play(assignment: Assignment, store: Store, where: Where) -> bytes | None:
    """Play a role to its end in this process; a trainer's pickled result comes back."""
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
    with closing(listen(assignment, store, master.handle, master.lose)):
        master.wait_until_finished()


def _play_server(assignment: Assignment, store: Store) -> None:
    server = ParameterServer(assignment.name, assignment.timeout_s)
    with closing(listen(assignment, store, server.handle, server.lose)):
        server.stopped.wait()  # as long as the job runs: the launcher ends it if the master dies


def _play_trainer(assignment: Assignment, store: Store, where: Where) -> bytes:
    device = _device(assignment)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("trainers", store),
        rank=assignment.rank,
        world_size=assignment.roles.trainers,
        timeout=datetime.timedelta(seconds=assignment.timeout_s),
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
    )
    train, args = pickle.loads(assignment.work)
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
    device = torch.device("cuda", assignment.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def report_of(name: str, error: BaseException, step: int | None) -> Report:
    """What a process says of an exception that ended it."""
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
        # gloo raises a plain RuntimeError, which begins with its own source file's name.
        if isinstance(current, RuntimeError) and "/gloo/" in describe(current):
            return True
        current = current.__cause__ or current.__context__
    return False
