"""Signs of life between hosts: who is gone, what failed first, and what all trainers returned.

The master's process keeps a `Lookout`; every process, the master's too, has a `Pulse`, which asks
the lookout again and again. Each answer is delayed by the period, unless there is news, so one call
is a sign of life in either direction and also brings the news of a failure at once. A link that is
cut sends nothing, no end of file either: only the silence tells of it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from hybridpar.errors import HybridParError, SpecError, WorkerError
from hybridpar.launch.assignment import Report
from hybridpar.launch.seats import Seat
from hybridpar.transport import Listener

_SETTLE_S = 0.5  # after a first cause, how long one that came earlier may take to show
WORD = "'s word"  # names the connection of a process for its end, beside that for its beats


class Beating(NamedTuple):
    """How often a sign of life is given, and after which silence a process is lost, in seconds."""

    period_s: float
    limit_s: float

    @classmethod
    def checked(cls, period_s: float, limit_s: float) -> Beating:
        """From settings.

        Raises:
            SpecError: if the limit leaves no room for three signs.
        """
        if not (period_s > 0 and 3 * period_s <= limit_s < math.inf):
            raise SpecError(
                f"heartbeat_s is {period_s} and heartbeat_limit_s {limit_s}. Give positive numbers "
                "of seconds, the limit at least three times the period."
            )
        return cls(period_s, limit_s)


class AllDone(NamedTuple):
    """Every process has finished: each trainer's pickled result, in rank order."""

    results: list[bytes]


class Lookout:
    """The master's side.

    Args:
        seats: every process of the job.
        address: address to bind.
        token: the job's secret.
        beating: period and limit of the signs of life.
        start_s: how long a process may take to give its first one.
    """

    def __init__(
        self, seats: Sequence[Seat], address: str, token: bytes, beating: Beating, start_s: float
    ) -> None:
        self._seats = {seat.name: seat for seat in seats}
        self._beating = beating
        self._start_s = start_s
        self._began = time.monotonic()
        self._heard: dict[str, float] = {}
        self._reports: dict[str, Report] = {}
        self._lost: dict[str, str] = {}
        self._first_cause = self._first_sign = float("inf")
        self._results: dict[str, bytes] = {}
        self._gone: set[str] = set()
        self._news: WorkerError | AllDone | None = None
        self._changed = threading.Condition()
        listener = Listener(
            "master", address, token, self._handle, on_lost=self._lose, on_leave=self._leave
        )
        self._listener = listener
        self.address = listener.address
        threading.Thread(target=self._look_out, name="lookout", daemon=True).start()

    def wait_until_all_know(self) -> None:
        """Return when everyone who still lives has heard how the job ended, or the limit is up."""
        with self._changed:
            # Only after its answer does a process end this connection.
            awaited = {name + WORD for name in self._seats.keys() - self._lost.keys()}
            self._changed.wait_for(lambda: self._gone >= awaited, self._beating.limit_s)
        self._listener.close()

    def _handle(self, peer: str, method: str, args: tuple[Any, ...]) -> object:
        name = peer.removesuffix(WORD)
        with self._changed:
            if method == "beat":
                self._heard[name] = time.monotonic()
                self._changed.wait_for(lambda: self._news, self._beating.period_s)
                return self._news
            if method == "finish":
                (self._results[name],) = args
                if len(self._results) == len(self._seats) and self._news is None:
                    self._news = AllDone(self._trainers_results())
            elif method == "fail":
                (self._reports[name],) = args
                self._note(cause=not self._reports[name].consequence)
            else:
                raise HybridParError(f"the lookout has no call '{method}' (asked by {peer}).")
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._news)
            return self._news

    def _trainers_results(self) -> list[bytes]:
        trainers = sorted(seat for seat in self._seats.values() if seat.role == "trainer")
        return [self._results[seat.name] for seat in trainers]

    def _lose(self, peer: str) -> None:
        with self._changed:
            name = peer.removesuffix(WORD)
            self._gone.add(peer)
            if self._news is None and name not in self._reports:
                self._lost.setdefault(
                    name,
                    "died without a word: killed by hand, for lack of memory, or by its torchrun. "
                    "See what torchrun printed on its host",
                )
                self._note(cause=True)
            self._changed.notify_all()

    def _leave(self, peer: str) -> None:
        with self._changed:
            self._gone.add(peer)
            self._changed.notify_all()

    def _note(self, *, cause: bool) -> None:
        now = time.monotonic()
        self._first_sign = min(self._first_sign, now)
        if cause:
            self._first_cause = min(self._first_cause, now)

    def _look_out(self) -> None:
        """Find who is silent, and, once something has failed, say what failed first."""
        with self._changed:
            while self._news is None:
                self._find_silent()
                # Where there are consequences alone, the silence that is their cause may take the
                # limit to show.
                verdict_at = min(
                    self._first_cause + _SETTLE_S, self._first_sign + self._beating.limit_s
                )
                if time.monotonic() >= verdict_at:
                    self._news = self._first_failure()
                    self._changed.notify_all()
                    return
                self._changed.wait(self._beating.period_s / 4)

    def _find_silent(self) -> None:
        now = time.monotonic()
        silences = {name: now - heard for name, heard in self._heard.items()}
        limit = self._beating.limit_s
        if max(silences.values(), default=0.0) > limit or self._lost:
            limit = (limit + self._beating.period_s) / 2  # who went silent along with it
        for name, silence in sorted(silences.items(), key=lambda item: -item[1]):
            if silence > limit and name not in self._lost and name not in self._reports:
                self._lost[name] = (
                    f"gave no sign of life for {silence:.1f} s (heartbeat_limit_s="
                    f"{self._beating.limit_s:g}): its host is down, its link is cut, or it is "
                    "stopped"
                )
                self._note(cause=True)
        late = now - self._began > self._start_s
        missing = self._seats.keys() - silences.keys() - self._lost.keys() if late else set()
        for name in sorted(missing):
            self._lost[name] = f"has not come within {self._start_s:g} s of the start"
            self._note(cause=True)

    def _first_failure(self) -> WorkerError:
        steps = [report.step for report in self._reports.values() if report.step is not None]
        own = [(n, report) for n, report in self._reports.items() if not report.consequence]
        if own or not self._lost:
            return error_of(*(own or list(self._reports.items()))[0], self._seats)
        name, cause = next(iter(self._lost.items()))
        others = [str(self._seats[other]) for other in sorted(self._lost) if other != name]
        seat = self._seats[name]
        return WorkerError(
            role=seat.role,
            rank=seat.rank,
            host=seat.host,
            step=max(steps, default=None),
            cause=cause + (f". Lost with it: {', '.join(others)}" if others else ""),
        )


def error_of(name: str, report: Report, seats: dict[str, Seat]) -> WorkerError:
    """The error that a report of one process stands for; it may name another as the origin."""
    seat = seats.get(report.origin, seats[name])
    return WorkerError(
        role=seat.role,
        rank=seat.rank,
        host=seat.host,
        step=report.step,
        cause=report.cause,
        remote_traceback=report.remote_traceback,
        is_wait=report.waited,
    )
