"""`Watch`: waits for a job's processes to end, and finds out which of them failed first."""

from __future__ import annotations

import math
import multiprocessing.connection
import sys
import time
from collections.abc import Sequence
from typing import Any

from hybridpar.launch.assignment import Report, Status
from hybridpar.launch.doctor import Desk, describe_all, who_waits
from hybridpar.launch.failure import End, choose_failure
from hybridpar.launch.health import Health
from hybridpar.launch.members import Member

_SETTLE_S = 0.5  # after a first failure, how long the true cause may take to show
_STATUS_S = 2.0  # how long a process may take to say what it does


class Watch:
    """Waits for the processes of one job.

    Args:
        members: the processes.
        desk: where someone may ask what the processes do.
        heartbeat_s: how often to look whether they are stopped, in seconds.
        heartbeat_limit_s: how long one may be stopped.
    """

    def __init__(
        self, members: Sequence[Member], desk: Desk, heartbeat_s: float, heartbeat_limit_s: float
    ) -> None:
        self._members = members
        self._desk = desk
        self._heartbeat_s = heartbeat_s
        self._health = Health(heartbeat_limit_s)
        self._running = {member.name: member for member in members}
        self._ends: dict[str, End] = {}
        self._statuses: dict[str, Status] = {}
        self._deadline = math.inf

    def wait_for_all(self) -> dict[str, Report]:
        """Every process's report, once all have ended well.

        Raises:
            WorkerError: as soon as one did not, or hangs.
        """
        while self._running and time.monotonic() < self._deadline:
            if self._desk.asked():
                self._desk.answer(self._describe())
            self._listen(self._heartbeat_s)
            self._look_for_hung()
        self._raise_failure()
        return {name: report for name, (_, report, _) in self._ends.items() if report is not None}

    def _listen(self, wait_s: float) -> None:
        """Take what the processes send, and note which have ended, for some time at most."""
        members: dict[object, Member] = {m.pipe: m for m in self._running.values()}
        members |= {m.process.sentinel: m for m in self._running.values()}
        wait_s = max(0.0, min(wait_s, self._deadline - time.monotonic()))
        handles: list[Any] = [*members, *self._desk.handles()]
        for ready in multiprocessing.connection.wait(handles, wait_s):
            member = members.get(ready)
            if member is not None and member.name in self._running:
                self._hear(member)

    def _hear(self, member: Member) -> None:
        message = member.receive()
        if isinstance(message, Status):
            self._statuses[member.name] = message
            return
        del self._running[member.name]
        self._ends[member.name] = member.assignment, message, member.process.exitcode
        if message is None or message.cause:
            self._deadline = min(self._deadline, time.monotonic() + _SETTLE_S)

    def _look_for_hung(self) -> None:
        by_pid = {member.pid: member for member in self._running.values()}
        for pid in self._health.hung(by_pid):
            member = by_pid[pid]
            del self._running[member.name]
            self._ask_all()
            self._ends[member.name] = member.assignment, None, None
            self._deadline = min(self._deadline, time.monotonic() + _SETTLE_S)

    def _raise_failure(self) -> None:
        steps = [status.step for status in self._statuses.values() if status.step is not None]
        failure = choose_failure(
            self._ends, {m.name: m.assignment for m in self._members}, max(steps, default=None)
        )
        if failure is None:
            return
        if failure.is_wait:  # nobody failed by itself: whoever reads it wants to see who waits
            self._deadline = math.inf
            print(self._describe(), file=sys.stderr, flush=True)  # noqa: T201 - a last report
            raise failure.with_more("\n".join(["Who waits for whom:", *self._who_waits()]))
        raise failure

    def _describe(self) -> str:
        """What every process does, as text."""
        self._ask_all()
        return describe_all([member.name for member in self._members], self._statuses)

    def _who_waits(self) -> list[str]:
        return who_waits([member.name for member in self._members], self._statuses)

    def _ask_all(self) -> None:
        """Have every process that runs say what it does."""
        self._statuses.clear()
        asked = set(self._running)
        for name in asked:
            self._running[name].ask_status()
        limit = time.monotonic() + _STATUS_S
        while asked & (self._running.keys() - self._statuses.keys()):
            left_s = limit - time.monotonic()
            if left_s <= 0:
                return
            self._listen(left_s)
