"""`Stopwatch`: takes the time of the parts of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

BATCHES = "batches"
ROUTE = "check and split ids"
ROWS = "rows into embeddings"
FORWARD = "forward and loss"
BACKWARD = "backward"
PUSH = "push gradients"
DENSE = "dense optimizer"
SERVERS = "wait for servers"


class Stopwatch:
    """Gives the time since it was last asked to one phase or another, if it runs."""

    def __init__(self) -> None:
        self.runs = False
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = 0.0

    def start(self) -> None:
        """Begin anew."""
        self.runs = True
        self.seconds = defaultdict(float)
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """What has passed since the last lap was this phase."""
        if self.runs:
            now = time.perf_counter()
            self.seconds[phase] += now - self._last
            self._last = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens within it is no part of a step."""
        runs, self.runs = self.runs, False
        began = time.perf_counter()
        try:
            yield
        finally:
            self.runs = runs
            self._last += time.perf_counter() - began

    def stop(self) -> dict[str, float]:
        """Seconds of each phase."""
        self.runs = False
        return dict(self.seconds)
