"""`launch` and the `RoleLauncher` behind it: start the processes, wait for them, end them all."""

from __future__ import annotations

import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any, Literal, TypeVar, get_args

import torch

from hybridpar.errors import SpecError, WorkerError
from hybridpar.launch import elastic
from hybridpar.launch.assignment import Assignment
from hybridpar.launch.doctor import Desk
from hybridpar.launch.heartbeat import Beating
from hybridpar.launch.joining import ElasticSettings
from hybridpar.launch.logs import LogSettings
from hybridpar.launch.members import Member, end_all, start
from hybridpar.launch.roles import Roles, process_name
from hybridpar.launch.surroundings import Surroundings
from hybridpar.launch.train_function import pickled_work
from hybridpar.launch.watch import Watch

Result = TypeVar("Result")
StartMethod = Literal["forkserver", "spawn"]
Device = Literal["cpu", "cuda"]

_logger = logging.getLogger("hybridpar")
_PRELOAD = ["hybridpar", "torch._dynamo"]  # optimizers and DDP import _dynamo when first used
_LOOPBACK = "127.0.0.1"


def launch(
    train: Callable[..., Result],
    *,
    roles: Roles | Mapping[str, int] | None = None,
    args: Sequence[object] = (),
    device: Device | None = None,
    max_restarts: int = 0,
    log_dir: str | os.PathLike[str] | None = None,
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
            ``{"trainer": 2, "ps": 1}``. None leaves it to ``hybridpar run``, whose ``--trainers``
            and ``--servers`` override what is given here, too.
        args: more arguments for ``train``; they are pickled.
        device: where the dense half runs: ``"cpu"``, or ``"cuda"``, a device a trainer; None takes
            CUDA where there is a device for every trainer.
        max_restarts: how often to start the whole job anew after a failure. ``train`` is called
            again from its beginning, with ``ctx.attempt`` one higher, so it should go on from
            what it has saved.
        log_dir: a folder in which each process writes what it logs and prints to a file of its own,
            such as ``trainer0.log``; None writes none.

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
    launcher = RoleLauncher(roles, device=device, max_restarts=max_restarts, log_dir=log_dir)
    return launcher.run(train, args)


class RoleLauncher:
    """Runs jobs of given roles; :func:`launch` with every setting.

    Args:
        roles: how many processes play which part; as in :func:`launch`.
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
        max_restarts: as in :func:`launch`.
        log_dir: as in :func:`launch`. The files have hybridpar's records from the level on that the
            logger ``hybridpar`` has here; INFO if it has none.
        heartbeat_s: how often the launcher looks whether a process is stopped, in seconds. Under
            torchrun, how often each process gives the master a sign of life.
        heartbeat_limit_s: how long a process may be stopped before the job fails because of it. One
            that merely takes long is no failure. Under torchrun, after which silence a process is
            lost; at least three times ``heartbeat_s``.

    Under torchrun ``start_method`` has no meaning, ``--max-restarts`` takes the place of
    ``max_restarts``, and without ``num_threads`` torch's own setting stays.

    Raises:
        SpecError: if a setting is wrong.
    """

    def __init__(
        self,
        roles: Roles | Mapping[str, int] | None = None,
        *,
        device: Device | None = None,
        start_method: StartMethod | None = None,
        timeout_s: float = 1800.0,
        num_threads: int | None = None,
        share_memory: bool = True,
        max_restarts: int = 0,
        interface: str | None = None,
        heartbeat_s: float = 1.0,
        heartbeat_limit_s: float = 5.0,
        log_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.roles = Roles.asked_for(roles)
        choices = {"device": (device, get_args(Device)),
                   "start_method": (start_method, get_args(StartMethod))}  # fmt: skip
        for name, (given, known) in choices.items():
            if given is not None and given not in known:
                raise SpecError(f"{name} is {given!r}. Choose {known[0]!r}, {known[1]!r} or None.")
        if num_threads is not None and not (isinstance(num_threads, int) and num_threads >= 1):
            raise SpecError(f"num_threads is {num_threads!r}. Give a whole number of at least 1.")
        self.device = device or _best_device(self.roles.trainers)
        self.start_method = start_method or ("spawn" if self.device == "cuda" else "forkserver")
        self.timeout_s = timeout_s
        self.share_memory = share_memory
        self.num_threads = num_threads or _threads_each(len(self.roles.names))
        if self.device == "cuda" and self.start_method == "forkserver":
            raise SpecError("CUDA cannot be used in forked processes. Use start_method='spawn'.")
        self.max_restarts = max_restarts
        self.heartbeat_s = heartbeat_s
        self.heartbeat_limit_s = heartbeat_limit_s
        for name in ("timeout_s", "heartbeat_s", "heartbeat_limit_s"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise SpecError(f"{name} is {value!r}. Give a positive number of seconds.")
        if not isinstance(max_restarts, int) or max_restarts < 0:
            raise SpecError(f"max_restarts is {max_restarts!r}. Give a whole number of at least 0.")
        self._asked = device, num_threads, interface
        self._logs = LogSettings.checked(log_dir)

    def run(self, train: Callable[..., Result], args: Sequence[object] = ()) -> list[Result]:
        """Run one job; see :func:`launch`."""
        work = pickled_work(train, args)
        here = Surroundings.read()
        if here is not None:
            return elastic.run(self._elastic(), here, train, work)
        for attempt in range(self.max_restarts):
            try:
                return self._run_once(work, attempt)
            except WorkerError as error:  # noqa: PERF203 - a job is no tight loop
                _logger.warning(
                    "restart %d of %d, because %s", attempt + 1, self.max_restarts, error
                )
        return self._run_once(work, self.max_restarts)

    def _elastic(self) -> ElasticSettings:
        """What matters under torchrun."""
        if self.max_restarts:
            _logger.warning(
                "max_restarts=%d has no effect under torchrun, which alone can start this process "
                "again. Run torchrun --max-restarts=%d …",
                self.max_restarts,
                self.max_restarts,
            )
        device, num_threads, interface = self._asked
        return ElasticSettings(
            roles=self.roles,
            device=device,
            timeout_s=self.timeout_s,
            num_threads=num_threads,
            share_memory=self.share_memory,
            interface=interface,
            beating=Beating.checked(self.heartbeat_s, self.heartbeat_limit_s),
            logs=self._logs,
        )

    def _run_once(self, work: bytes, attempt: int) -> list[Any]:
        with Desk() as desk, self._processes(work, attempt) as members:
            watch = Watch(members, desk, self.heartbeat_s, self.heartbeat_limit_s)
            reports = watch.wait_for_all()
        results = [reports[process_name("trainer", rank)] for rank in range(self.roles.trainers)]
        return [pickle.loads(report.result or b"") for report in results]

    @contextmanager
    def _processes(self, work: bytes, attempt: int) -> Iterator[list[Member]]:
        """The job's processes, started; none of them is left when the block ends."""
        context = multiprocessing.get_context(self.start_method)
        if self.start_method == "forkserver":
            forkserver.set_forkserver_preload(_PRELOAD)  # has no effect on one that runs already
        members: list[Member] = []
        try:
            # Bound here, then handed to the master: no port is fixed, and none is lost meanwhile.
            with socket.create_server((_LOOPBACK, 0), backlog=128) as store_socket:
                port = store_socket.getsockname()[1]
                for assignment in self._assignments(work, attempt, port):
                    shared = store_socket if assignment.role == "master" else None
                    members.append(start(context, assignment, shared))
            yield members
        finally:
            end_all(members)

    def _assignments(self, work: bytes, attempt: int, store_port: int) -> list[Assignment]:
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
                attempt=attempt,
                share_memory=self.share_memory,
                environment=dict(os.environ),
                work=work if role == "trainer" else b"",
                logs=self._logs,
            )
            for role, rank in self.roles.members()
        ]


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
