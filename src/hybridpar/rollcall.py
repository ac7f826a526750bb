"""`RollCall`: the rounds of an epoch, joined by whoever still has data."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor

from hybridpar.gather import Gather
from hybridpar.messages import Turn

Ranks: TypeAlias = tuple[int, ...]


class RoundEnd(NamedTuple):
    """What all trainers of a round hear.

    Attributes:
        joined: the ranks that were in it.
        active: those that will be in the next one of the epoch.
        result: what was made of their turns.
    """

    joined: Ranks
    active: Ranks
    result: Tensor | None


class RollCall:
    """Gathers the trainers' turns, round after round.

    All trainers join the round that opens an epoch, and each round says who joins the next: those
    whose turn had ``more``. So an epoch ends cleanly whatever number of batches each trainer has.

    Args:
        what: who gathers, for messages.
        num_trainers: how many trainers there are.
        timeout_s: longest wait for the last, in seconds.
        action: done once a round with all its turns, by rank, before anyone is answered; what it
            returns every trainer gets.
    """

    def __init__(
        self,
        what: str,
        num_trainers: int,
        timeout_s: float,
        action: Callable[[dict[int, Turn]], Tensor | None],
    ) -> None:
        self._all: Ranks = tuple(range(num_trainers))
        self._joined = self._all
        self._active: Ranks = ()
        self._action = action
        self._turns: Gather[Turn, RoundEnd] = Gather(what, self._complete, timeout_s)
        self._ends: Gather[None, Ranks] = Gather(what, lambda _: self._joined, timeout_s)
        self._values: Gather[object, dict[int, object]] = Gather(what, dict, timeout_s)

    def arrive(self, turn: Turn, *, opens: bool) -> RoundEnd:
        """Join a round and wait for the rest.

        Args:
            turn: what this trainer brings.
            opens: whether the round opens an epoch, so that every trainer is in it.
        """
        key = f"step {turn.step}" + (f" of epoch {turn.epoch}" if turn.epoch else "")
        return self._turns.arrive(
            key, turn.rank, turn, lambda: self._all if opens or not self._active else self._active
        )

    def gather(self, rank: int, where: str) -> Ranks:
        """Wait until every trainer is at the same place; the ranks of the last round."""
        return self._ends.arrive(where, rank, None, lambda: self._all)

    def compare(self, rank: int, where: str, value: object) -> dict[int, object]:
        """Wait until every trainer is at the same place; what each of them brought."""
        return self._values.arrive(where, rank, value, lambda: self._all)

    def touch(self) -> None:
        """Whoever gathers waits for something that has got on: their limit counts from now."""
        self._ends.touch()

    def leave(self, rank: int, why: str) -> None:
        """A trainer will not come any more: rounds that wait for it fail, saying ``why``."""
        self._turns.leave(rank, why)
        self._ends.leave(rank, why)
        self._values.leave(rank, why)

    def _complete(self, turns: dict[int, Turn]) -> RoundEnd:
        result = self._action(turns)
        self._ends.touch()
        self._joined = tuple(turns)
        self._active = tuple(rank for rank, turn in turns.items() if turn.more)
        return RoundEnd(self._joined, self._active, result)
