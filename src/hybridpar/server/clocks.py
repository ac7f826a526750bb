"""`Clocks`: how far each trainer's updates have got, and how far behind a lookup's rows may be."""

from __future__ import annotations

import threading
import time

from hybridpar.errors import WaitTimeoutError


class Clocks:
    """Counts each trainer's applied updates, where updates are applied on arrival.

    Rows read for step c lack the updates of a trainer's steps from its count up to c - 1; the
    *staleness* is that number for the slowest trainer. Bounding it is the stale synchronous
    parallel model: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server", NIPS 2013.

    Args:
        name: the server's name, for messages.
        num_trainers: how many trainers there are.
        bound: the largest staleness that is let through; None for any.
        timeout_s: longest wait for the bound, in seconds.
    """

    def __init__(self, name: str, num_trainers: int, bound: int | None, timeout_s: float) -> None:
        self._name = name
        self._bound = bound
        self._timeout_s = timeout_s
        self._all = range(num_trainers)
        self._applied = dict.fromkeys(self._all, 0)
        self._pushes = dict.fromkeys(self._all, 0)
        self._changed = threading.Condition()

    def leave(self, rank: int) -> None:
        """A trainer's updates are over for now: nobody waits for it.

        When all have left, all are back at once, and their steps count from 0.
        """
        with self._changed:
            self._applied.pop(rank, None)
            if not self._applied:
                self._applied = dict.fromkeys(self._all, 0)
            self._changed.notify_all()

    def tick(self, rank: int, *, stepped: bool) -> None:
        """One of a trainer's updates was applied, or skipped."""
        with self._changed:
            self._pushes[rank] += stepped
            if rank in self._applied:
                self._applied[rank] += 1
            self._changed.notify_all()

    @property
    def steps(self) -> int:
        """Of the trainer that has made the most updates, how many."""
        with self._changed:
            return max(self._pushes.values())

    def restore(self, steps: int) -> None:
        """Count on from so many updates of every trainer."""
        with self._changed:
            self._pushes = dict.fromkeys(self._all, steps)

    def next_step(self, rank: int) -> int:
        """Which step a trainer's coming update belongs to, counted from 1 over the model's life."""
        with self._changed:
            return max(self._pushes[rank] + 1, *self._pushes.values())

    def wait(self, step: int) -> int:
        """Wait until rows for ``step`` are within the bound; their staleness.

        Raises:
            WaitTimeoutError: if that took too long; names the slow trainers.
        """
        with self._changed:
            limit = time.monotonic() + self._timeout_s
            while self._bound is not None and self._behind(step) > self._bound:
                if not self._changed.wait(limit - time.monotonic()) and time.monotonic() >= limit:
                    slow = [r for r, n in self._applied.items() if step - n > self._bound]
                    names = ", ".join(f"trainer{rank}" for rank in sorted(slow))
                    raise WaitTimeoutError(
                        f"{self._name} waited {self._timeout_s:g} s at step {step} for updates of "
                        f"{names}, in vain. If a step may take longer, raise timeout_s."
                    )
            return self._behind(step)

    def _behind(self, step: int) -> int:
        return max(0, step - min(self._applied.values(), default=step))
