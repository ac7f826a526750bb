"""`Health`: finds processes on this machine that hang without dying."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

_STOPPED = ("T", "t")  # by a signal, by a debugger


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped; False where the system does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(") ")[2][:1] in _STOPPED


class Health:
    """Looks at processes now and then, and says which have been stopped for too long.

    What a process computes, and for how long, does not matter: one that is merely slow runs. So
    there is no heartbeat that a busy interpreter could miss.

    Args:
        limit_s: how long a process may be stopped, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._stopped_since: dict[int, float] = {}

    def hung(self, pids: Iterable[int]) -> list[int]:
        """Look at some processes: those that have been stopped for longer than the limit."""
        now = time.monotonic()
        stopped = {pid for pid in pids if is_stopped(pid)}
        self._stopped_since = {pid: self._stopped_since.get(pid, now) for pid in stopped}
        return [pid for pid, since in self._stopped_since.items() if now - since > self._limit_s]
