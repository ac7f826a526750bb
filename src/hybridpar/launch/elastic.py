"""A job that torchrun started, as one of its processes: play a role here, end with the others."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hybridpar.errors import HybridParError, WaitTimeoutError, WorkerError, describe
from hybridpar.launch import leaving
from hybridpar.launch.assignment import Assignment
from hybridpar.launch.heartbeat import Lookout, error_of
from hybridpar.launch.interfaces import Interface
from hybridpar.launch.joining import ElasticSettings, Joined, join
from hybridpar.launch.logs import logged
from hybridpar.launch.playing import Where, play
from hybridpar.launch.pulse import Pulse
from hybridpar.launch.reports import report_of
from hybridpar.launch.surroundings import Surroundings

_logger = logging.getLogger("hybridpar")
_GRACE_S = 2.0  # after a failure, how long the train function may take to notice
_LOOKOUT = "address/lookout"


def run(
    settings: ElasticSettings, here: Surroundings, train: Callable[..., object], work: bytes
) -> list[Any]:
    """Take part in the job, and return what every trainer returned, in rank order.

    Args:
        settings: what the launcher was told.
        here: what torchrun told this process.
        train: the train function.
        work: the function and its arguments, pickled.

    Raises:
        WorkerError: on every process, if one failed: the one that failed first is named.
        SpecError: if the processes do not fit together.
        WaitTimeoutError: if one does not come to the start.
        PeerLostError: if torchrun's store cannot be reached.
    """
    joined = join(settings, here, train)
    name = joined.me.name
    with (
        logged(settings.logs, name, joined.attempt),
        _settled(joined.interface, settings.num_threads),
    ):
        _logger.info(
            "%s is process %d on host %s, at %s (%s)",
            name, os.getpid(), here.host, *joined.interface,
        )  # fmt: skip
        try:
            return _Part(joined, settings, work).run()
        except BaseException as error:
            _logger.error("%s ends: %s", name, describe(error))
            raise


@contextmanager
def _settled(interface: Interface, num_threads: int | None) -> Iterator[None]:
    """Set torch up as in a process of its own; put it back once the job has ended."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    before = {name: os.environ.get(name) for name in names}
    threads = torch.get_num_threads()
    os.environ["GLOO_SOCKET_IFNAME"] = interface.name
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface.name)
    torch.set_num_threads(num_threads or threads)
    torch.seed()  # every process would draw the same numbers
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class _Part:
    """This process's part in the job."""

    def __init__(self, joined: Joined, settings: ElasticSettings, work: bytes) -> None:
        self._joined = joined
        self._settings = settings
        self._assignment = _assignment(joined, settings, work)
        self._seats = {seat.name: seat for seat in joined.seats}
        self._where = Where()
        self._pulse: Pulse | None = None
        self._failure: WorkerError | None = None
        self._over = threading.Event()  # the role is played, or the job has failed
        self._leaving = threading.Event()  # the main thread knows how the job ended

    def run(self) -> list[Any]:
        lookout = self._open_lookout() if self._joined.me.role == "master" else None
        try:
            self._pulse = pulse = self._connect()
            pulse.start()
            results = pulse.finish(self._play())
        except BaseException as error:
            failure = self._explain(error)
            leaving.leave_abruptly()
            if isinstance(error, KeyboardInterrupt):
                raise
            raise failure from None  # it has the traceback, if it is this process's
        finally:
            self._leaving.set()
            if self._pulse is not None:
                self._pulse.close()
            leaving.keep_process_groups()
            if lookout is not None:
                lookout.wait_until_all_know()
        leaving.forget_process_groups()
        return [pickle.loads(result) for result in results]

    def _open_lookout(self) -> Lookout:
        joined = self._joined
        address = joined.interface.address
        lookout = Lookout(
            joined.seats, address, joined.token, self._settings.beating, self._settings.start_s
        )
        host, port = lookout.address
        joined.store.set(_LOOKOUT, f"{host}:{port}")
        return lookout

    def _connect(self) -> Pulse:
        joined = self._joined
        deadline = time.monotonic() + self._settings.start_s
        while not joined.store.check([_LOOKOUT]):
            if time.monotonic() > deadline:
                master = self._seats["master"]
                raise WaitTimeoutError(
                    f"{master} has not opened its lookout within {self._settings.start_s:g} s; "
                    f"{joined.me} waited for it."
                )
            time.sleep(0.02)
        host, _, port = joined.store.get(_LOOKOUT).decode().rpartition(":")
        return Pulse(
            joined.me,
            joined.seats,
            (host, int(port)),
            joined.token,
            self._settings.beating,
            self._fail,
        )

    def _play(self) -> bytes | None:
        """Play the role: a train function runs in the main thread, as signal handlers ask for."""
        if self._joined.me.role == "trainer":
            return play(self._assignment, self._joined.store, self._where)
        raised: list[BaseException] = []

        def perform() -> None:
            try:
                play(self._assignment, self._joined.store, self._where)
            except BaseException as error:  # noqa: BLE001 - the main thread raises it
                raised.append(error)
            self._over.set()

        threading.Thread(target=perform, name=self._joined.me.name, daemon=True).start()
        with leaving.sigterm_noted() as times:
            while not self._over.wait(_GRACE_S / 10):
                if times and time.monotonic() - times[0] > _GRACE_S:
                    raise SystemExit(128 + signal.SIGTERM)
        if raised:
            raise raised[0]
        if self._failure is not None:
            raise self._failure
        return None

    def _fail(self, failure: WorkerError) -> None:
        """The job has failed: have the main thread raise it, or end this process from here."""
        self._failure = failure
        self._over.set()
        if self._pulse is not None:
            self._pulse.interrupt()
        if self._where.context is not None:
            self._where.context._interrupt()
        # Inside gloo, or in a long computation, it cannot notice.
        if not self._leaving.wait(_GRACE_S):
            leaving.end_now(failure)

    def _explain(self, error: BaseException) -> WorkerError:
        """The job's first failure, given an exception of this process."""
        if self._failure is not None:
            return self._failure
        if isinstance(error, WorkerError):
            return error
        name = self._joined.me.name
        report = report_of(name, error, self._where.step)
        if self._pulse is None:
            return error_of(name, report, self._seats)
        try:
            return self._pulse.fail(report)
        except HybridParError:  # the verdict came by the pulse, or the master is gone
            self._over.wait(self._settings.beating.limit_s + 1.0)
        mine = error_of(name, report, self._seats)
        if self._pulse.master_is_lost and not report.consequence:
            return mine
        return self._failure or mine


def _assignment(joined: Joined, settings: ElasticSettings, work: bytes) -> Assignment:
    return Assignment(
        role=joined.me.role,
        rank=joined.me.rank,
        local_rank=joined.me.local_rank,
        roles=settings.roles,
        host=joined.interface.address,
        store_port=0,
        token=joined.token,
        timeout_s=settings.timeout_s,
        device=joined.device,
        num_threads=torch.get_num_threads(),
        attempt=joined.attempt,
        share_memory=settings.share_memory,
        environment={},
        work=work if joined.me.role == "trainer" else b"",
    )
