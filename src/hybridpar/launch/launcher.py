"""`launch` and the `RoleLauncher` behind it: start the processes, wait for them, end them all."""

from __future__ import annotations

import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Literal, TypeVar

import torch

from hybridpar.errors import SpecError, TrainFunctionError
from hybridpar.launch import elastic, worker
from hybridpar.launch.assignment import Assignment, Report
from hybridpar.launch.failure import choose_failure
from hybridpar.launch.heartbeat import Beating
from hybridpar.launch.joining import ElasticSettings
from hybridpar.launch.roles import Roles, process_name
from hybridpar.launch.surroundings import Surroundings

Result = TypeVar("Result")
StartMethod = Literal["forkserver", "spawn"]
Device = Literal["cpu", "cuda"]

_logger = logging.getLogger("hybridpar")
_PRELOAD = ["hybridpar", "torch._dynamo"]  # optimizers and DDP import _dynamo when first used
_LOOPBACK = "127.0.0.1"
_SETTLE_S = 0.5  # after a first failure, how long the true cause may take to show
_TERM_S = 1.0  # how long a process may take to end after SIGTERM


def launch(
    train: Callable[..., Result],
    *,
    roles: Roles | Mapping[str, int],
    args: Sequence[object] = (),
    device: Device | None = None,
) -> list[Result]:
    """Run ``train`` in every trainer of a job, and return what it returned.

    Starts one master, the parameter servers and the trainers on this machine, waits until every
    trainer has finished, and leaves no process behind, whatever happens. Call it under
    ``if __name__ == "__main__":``, as multiprocessing asks for. In a process that torchrun started
    it starts nothing: this process plays one of the roles itself, and the results come back in
    each of them.

    Args:
        train: called as ``train(ctx, *args)`` with a :class:`TrainerContext`. A function that the
            other processes can import: not a lambda, nor defined in another function.
        roles: how many processes play which part: ``Roles(trainers=2, servers=1)`` or
            ``{"trainer": 2, "ps": 1}``.
        args: more arguments for ``train``; they are pickled.
        device: where the dense half runs: ``"cpu"``, or ``"cuda"``, a device a trainer; None takes
            CUDA where there is a device for every trainer.

    Returns:
        Each trainer's result, in rank order.

    Raises:
        WorkerError: if a process raised, died, or waited in vain; names the one that failed first.
        TrainFunctionError: if ``train``, its arguments or its result cannot be pickled.
        SpecError: if the roles are wrong, or torchrun's processes do not fit together.
        WaitTimeoutError: if a process that torchrun should have started does not come.
        PeerLostError: if torchrun's store cannot be reached.

    Example:
        >>> def train(ctx):
        ...     return ctx.rank
        >>> launch(train, roles=Roles(trainers=2, servers=1))  # doctest: +SKIP
        [0, 1]
    """
    return RoleLauncher(roles, device=device).run(train, args)


class RoleLauncher:
    """Runs jobs of given roles; :func:`launch` with every setting.

    Args:
        roles: how many processes play which part.
        device: as in :func:`launch`.
        start_method: how processes start. ``"forkserver"`` forks them from a process that has
            torch loaded already: the first job takes some seconds, the next about one. None takes
            it for the CPU, and ``"spawn"`` for CUDA, which cannot be forked.
        timeout_s: the longest that one process waits for another, in start-up or in a step.
        num_threads: torch's threads in each process; None takes ``OMP_NUM_THREADS`` if it is set,
            else an equal share of the cores.
        share_memory: whether trainers read the tables of servers on this machine themselves, and
            servers the trainers' gradients; False sends everything by socket, as between machines.
        interface: under torchrun, the name of the network interface to use, such as ``"eth0"``;
            None takes ``HYBRIDPAR_INTERFACE``, else that of the route to the master.
        heartbeat_s: under torchrun, how often a process gives the master a sign of life.
        heartbeat_limit_s: after which silence it is lost, and the job ends; at least three times
            ``heartbeat_s``.

    Under torchrun ``start_method`` has no meaning, and without ``num_threads`` torch's own setting
    stays.

    Raises:
        SpecError: if a setting is wrong.
    """

    def __init__(
        self,
        roles: Roles | Mapping[str, int],
        *,
        device: Device | None = None,
        start_method: StartMethod | None = None,
        timeout_s: float = 1800.0,
        num_threads: int | None = None,
        share_memory: bool = True,
        interface: str | None = None,
        heartbeat_s: float = 1.0,
        heartbeat_limit_s: float = 5.0,
    ) -> None:
        self.roles = Roles.of(roles)
        self.device = device or _best_device(self.roles.trainers)
        self.start_method = start_method or ("spawn" if self.device == "cuda" else "forkserver")
        self.timeout_s = timeout_s
        self.share_memory = share_memory
        self.num_threads = num_threads or _threads_each(len(self.roles.names))
        if self.device == "cuda" and self.start_method == "forkserver":
            raise SpecError("CUDA cannot be used in forked processes. Use start_method='spawn'.")
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise SpecError(f"timeout_s is {timeout_s}. Give a positive number of seconds.")
        self._elastic = ElasticSettings(
            roles=self.roles,
            device=device,
            timeout_s=timeout_s,
            num_threads=num_threads,
            share_memory=share_memory,
            interface=interface,
            beating=Beating.checked(heartbeat_s, heartbeat_limit_s),
        )

    def run(self, train: Callable[..., Result], args: Sequence[object] = ()) -> list[Result]:
        """Run one job; see :func:`launch`."""
        work = _pickled_work(train, args)
        here = Surroundings.read()
        if here is not None:
            return elastic.run(self._elastic, here, train, work)
        with self._processes(work) as members:
            reports = _wait_for_all(members)
        results = [reports[process_name("trainer", rank)] for rank in range(self.roles.trainers)]
        return [pickle.loads(report.result or b"") for report in results]

    @contextmanager
    def _processes(self, work: bytes) -> Iterator[list[Member]]:
        """The job's processes, started; none of them is left when the block ends."""
        context = multiprocessing.get_context(self.start_method)
        if self.start_method == "forkserver":
            forkserver.set_forkserver_preload(_PRELOAD)  # has no effect on one that runs already
        members: list[Member] = []
        try:
            # Bound here, then handed to the master: no port is fixed, and none is lost meanwhile.
            with socket.create_server((_LOOPBACK, 0), backlog=128) as store_socket:
                for assignment in self._assignments(work, store_socket.getsockname()[1]):
                    shared = store_socket if assignment.role == "master" else None
                    members.append(_start(context, assignment, shared))
            yield members
        finally:
            _end_all(members)

    def _assignments(self, work: bytes, store_port: int) -> list[Assignment]:
        token = secrets.token_bytes(32)
        return [
            Assignment(
                role=role,
                rank=rank,
                local_rank=rank,
                roles=self.roles,
                host=_LOOPBACK,
                store_port=store_port,
                token=token,
                timeout_s=self.timeout_s,
                device=self.device,
                num_threads=self.num_threads,
                share_memory=self.share_memory,
                environment=dict(os.environ),
                work=work if role == "trainer" else b"",
            )
            for role, rank in self.roles.members()
        ]


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


def _start(
    context: BaseContext, assignment: Assignment, store_socket: socket.socket | None
) -> Member:
    ours, theirs = context.Pipe()
    process = context.Process(  # type: ignore[attr-defined]
        target=worker.main, args=(assignment, theirs, store_socket), name=assignment.name
    )
    process.start()
    theirs.close()
    _logger.info("%s is process %d on this machine", assignment.name, process.pid)
    return Member(assignment, process, ours)


def _wait_for_all(members: list[Member]) -> dict[str, Report]:
    """Every process's report, once all have ended well.

    Raises:
        WorkerError: as soon as one did not.
    """
    reports: dict[str, Report] = {}
    running = {member.name: member for member in members}
    ended: list[Member] = []
    deadline = math.inf
    while running and time.monotonic() < deadline:
        pipes = {member.pipe: member for member in running.values()}
        deaths = {member.process.sentinel: member for member in running.values()}
        wait_s = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        for ready in multiprocessing.connection.wait([*pipes, *deaths], wait_s):
            member = pipes.get(ready) or deaths[ready]  # type: ignore[call-overload,index]
            if running.pop(member.name, None) is None:
                continue  # its pipe and its end were ready at once
            ended.append(member)
            report = _receive(member)
            if report is not None:
                reports[member.name] = report
            if report is None or report.cause:
                deadline = min(deadline, time.monotonic() + _SETTLE_S)
    failure = choose_failure(
        {
            member.name: (member.assignment, reports.get(member.name), member.process.exitcode)
            for member in ended
        },
        {member.name: member.assignment for member in members},
    )
    if failure is not None:
        raise failure
    return reports


def _receive(member: Member) -> Report | None:
    """The report of a process that is ending; None if it ended without one."""
    try:
        if not member.pipe.poll():  # a child of its own may hold the pipe open: no end of file
            raise EOFError
        report = pickle.loads(member.pipe.recv_bytes())
    except (EOFError, OSError):
        member.process.join(_TERM_S)
        return None
    assert isinstance(report, Report)
    return report


def _end_all(members: list[Member]) -> None:
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


def _pickled_work(train: Callable[..., object], args: Sequence[object]) -> bytes:
    if not callable(train):
        raise TrainFunctionError(f"launch got train={train!r}. Give a function of the context.")
    try:
        return pickle.dumps((train, tuple(args)))
    except Exception as error:
        name = getattr(train, "__qualname__", repr(train))
        raise TrainFunctionError(
            f"The train function '{name}' or its args cannot be sent to other processes: {error}. "
            "Define the function at the top of a module, not as a lambda or inside another "
            "function, and pass plain values or tensors as args."
        ) from error


def _best_device(num_trainers: int) -> Device:
    return (
        "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= num_trainers else "cpu"
    )


def _threads_each(num_processes: int) -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // num_processes)
