"""What each thread of this process waits for in another process, for whoever asks in a hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_waits: dict[int, tuple[float, Callable[[], str]]] = {}


@contextmanager
def waiting(what: Callable[[], str]) -> Iterator[None]:
    """Within it, this thread waits: for ``what()``, such as ``"ps0 to answer 'lookup'"``."""
    thread = threading.get_ident()
    outer = _waits.get(thread)
    _waits[thread] = time.monotonic(), what
    try:
        yield
    finally:
        if outer is None:
            del _waits[thread]
        else:
            _waits[thread] = outer


def waits() -> list[str]:
    """What this process waits for now, the longest wait first."""
    found = sorted(_waits.copy().values(), key=lambda wait: wait[0])
    now = time.monotonic()
    return [f"waits for {what()} since {now - since:.1f} s" for since, what in found]
