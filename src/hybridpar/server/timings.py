"""`Timings`: where a server's time on one model goes, in seconds since the model was made."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Timings:
    """Adds up seconds by phase: ``update``, ``lookup`` and ``queue``; for several threads.

    The queue is how long the first trainer's gradients of a step wait for the last trainer's.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._first_came: float | None = None
        self._lock = threading.Lock()

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Within it, time passes for a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._seconds[phase] += time.perf_counter() - started

    def one_came(self) -> None:
        """A trainer's gradients of a step are here."""
        if self._first_came is None:
            self._first_came = time.perf_counter()

    def all_came(self) -> None:
        """All trainers' are."""
        if self._first_came is not None:
            self._seconds["queue"] += time.perf_counter() - self._first_came
        self._first_came = None

    def seconds(self) -> dict[str, float]:
        """So far, by phase."""
        with self._lock:
            return dict(self._seconds)
