"""`Gather`: a round that several trainers join and whose last arrival does the work for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable
from typing import Generic, TypeVar

from hybridpar.errors import PeerLostError, WaitTimeoutError
from hybridpar.waits import waiting

Item = TypeVar("Item")
Result = TypeVar("Result")


class Gather(Generic[Item, Result]):
    """Collects one item from every expected rank, then acts on all of them once.

    Every arrival blocks its own thread until the round is complete. The thread that completes it
    runs ``action`` with the items in rank order, and all arrivals return its result or raise its
    exception.

    Args:
        what: who gathers, for messages, such as ``"ps0"``.
        action: called with ``{rank: item}``, in rank order.
        timeout_s: longest wait for the last to come, from when any round was last completed.
    """

    def __init__(
        self, what: str, action: Callable[[dict[int, Item]], Result], timeout_s: float
    ) -> None:
        self._what = what
        self._action = action
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._rounds: dict[Hashable, _Round[Item, Result]] = {}
        self._gone: dict[int, str] = {}
        self._last_completed = 0.0

    def arrive(
        self, key: Hashable, rank: int, item: Item, expected: Callable[[], Collection[int]]
    ) -> Result:
        """Join round ``key`` as ``rank`` and wait for the rest.

        Args:
            key: names the round; every rank in it gives the same.
            rank: who comes.
            item: what it brings.
            expected: tells which ranks the round is complete with, once no earlier round is open.

        Raises:
            WaitTimeoutError: if the round was not complete in time; names the missing trainers.
            PeerLostError: if a trainer that is waited for has died or finished.
        """
        with self._changed:
            round_ = self._rounds.setdefault(key, _Round())
            round_.items[rank] = item
            if round_.items.keys() == set(expected()):
                del self._rounds[key]
                self._complete(round_)
                self._last_completed = time.monotonic()
                self._changed.notify_all()
            else:
                with waiting(lambda: self._missing(key, round_, expected)):
                    self._wait(key, round_, expected)
                if round_.error is not None:
                    self._rounds.pop(key, None)  # whoever still comes shall not complete it
        if round_.error is not None:
            raise round_.error
        return round_.result[0]

    def touch(self) -> None:
        """Something else that the arrivals wait for has got on: their limit counts from now."""
        with self._changed:
            self._last_completed = time.monotonic()
            self._changed.notify_all()

    def leave(self, rank: int, why: str) -> None:
        """From now on ``rank`` will not come: a round that waits for it fails, saying ``why``."""
        with self._changed:
            self._gone[rank] = why
            self._changed.notify_all()

    def _missing(
        self,
        key: Hashable,
        round_: _Round[Item, Result],
        expected: Callable[[], Collection[int]],
    ) -> str:
        names = ", ".join(f"trainer{rank}" for rank in sorted(set(expected()) - set(round_.items)))
        return f"{names} to come to {key}"

    def _complete(self, round_: _Round[Item, Result]) -> None:
        try:
            round_.result.append(self._action(dict(sorted(round_.items.items()))))
        except Exception as error:  # noqa: BLE001 - every arrival raises it
            round_.error = error

    def _wait(
        self,
        key: Hashable,
        round_: _Round[Item, Result],
        expected: Callable[[], Collection[int]],
    ) -> None:
        arrived = time.monotonic()
        while not round_.done:
            limit = max(arrived, self._last_completed) + self._timeout_s
            missing = sorted(set(expected()) - round_.items.keys())
            gone = [self._gone[rank] for rank in missing if rank in self._gone]
            if gone:
                round_.error = PeerLostError(
                    f"{self._what} cannot complete {key}: {'; '.join(gone)}."
                )
                self._changed.notify_all()
            elif time.monotonic() < limit:
                self._changed.wait(limit - time.monotonic())
            else:
                names = ", ".join(f"trainer{rank}" for rank in missing)
                round_.error = WaitTimeoutError(
                    f"{self._what} waited {self._timeout_s:g} s at {key} for {names}, in vain. "
                    "If a step may take longer, raise timeout_s of the launcher."
                )
                self._changed.notify_all()


class _Round(Generic[Item, Result]):
    """One round under way: what came, and in the end its result or error."""

    __slots__ = ("error", "items", "result")

    def __init__(self) -> None:
        self.items: dict[int, Item] = {}
        self.result: list[Result] = []
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        return bool(self.result) or self.error is not None
