"""`Lanes`: the threads between which a server splits a large update."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_WORTH_SPLITTING = 8192  # ids from which two threads beat one


class Lanes:
    """Threads that each update rows of their own: no two touch a row, so none waits for another.

    In sync mode the trainers wait for the update, and their cores are free.

    Args:
        most: at most so many threads; as many as there are trainers, say.
    """

    def __init__(self, most: int = 1) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self._most = 1 << (max(1, min(most, cores)).bit_length() - 1)
        self._pool = ThreadPoolExecutor(max(1, self._most - 1), thread_name_prefix="lane")

    def count_for(self, ids: int) -> int:
        """How many lanes an update of so many ids is worth: a power of two."""
        return self._most if ids >= _WORTH_SPLITTING else 1

    def run(self, act: Callable[[int], None], count: int) -> None:
        """Call ``act`` with every number below ``count``, at once, and wait for all."""
        others = [self._pool.submit(act, number) for number in range(1, count)]
        act(0)
        for other in others:
            other.result()


ONE_LANE = Lanes()
