"""`ParameterServer`: holds slabs, answers lookups, gathers the trainers' turns and applies them."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, TypeAlias

from torch import Tensor

from hybridpar.errors import HybridParError
from hybridpar.gather import Gather
from hybridpar.messages import Lookups, Pooled, ServedModel, Turn, TurnAnswer
from hybridpar.server.slab import Slab

_Ranks: TypeAlias = tuple[int, ...]


class ParameterServer:
    """The one parameter server of a server process.

    Its calls, by name: ``create``, ``lookup``, ``take_turn``, ``close_epoch``, ``read``, ``stop``.

    Args:
        name: the process's name, such as ``"ps0"``.
        timeout_s: longest wait for the last trainer's turn, in seconds.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._models: dict[int, _Tables] = {}
        self._stop_asked = False
        self.stopped = threading.Event()

    def handle(self, peer: str, method: str, args: tuple[Any, ...]) -> object:
        """Answer one call of one peer."""
        if method == "create":
            (served,) = args
            self._models[served.model_id] = _Tables(served, self._name, self._timeout_s)
            return None
        if method == "stop":
            self._stop_asked = True
            return None
        model_id, *rest = args
        tables = self._models[model_id]
        if method == "lookup":
            return tables.lookup(*rest)
        if method == "take_turn":
            return tables.take_turn(*rest)
        if method == "close_epoch":
            return tables.close_epoch(*rest)
        if method == "read":
            return tables.read(*rest)
        raise HybridParError(f"{self._name} has no call '{method}' (asked by {peer}).")

    def lose(self, peer: str, why: str) -> None:
        """A peer's connection has ended: whoever waits for that trainer is told ``why``.

        The server stops when whoever asked for it has left, and so has had its answer.
        """
        if peer == "master" and self._stop_asked:
            self.stopped.set()
        if peer.startswith("trainer"):
            for tables in self._models.values():
                tables.leave(int(peer.removeprefix("trainer")), f"{peer} {why}")


class _Tables:
    """One model's slabs on this server, and the rounds in which its trainers update them."""

    def __init__(self, served: ServedModel, server: str, timeout_s: float) -> None:
        specs = {spec.name: spec for spec in served.specs}
        self._slabs = [
            Slab(layout, specs, served.settings, served.seed) for layout in served.layouts
        ]
        self._all = tuple(range(served.num_trainers))
        self._joined: _Ranks = self._all  # ranks of the last round
        self._active: _Ranks = ()  # ranks of the next round of an epoch under way
        self._turns: Gather[Turn, tuple[_Ranks, _Ranks]] = Gather(server, self._apply, timeout_s)
        self._closings: Gather[None, _Ranks] = Gather(server, lambda _: self._joined, timeout_s)

    def lookup(self, lookups: Lookups) -> Pooled:
        return tuple(
            None if lookup is None else slab.lookup(lookup)
            for slab, lookup in zip(self._slabs, lookups, strict=True)
        )

    def take_turn(self, turn: Turn) -> TurnAnswer:
        key = f"step {turn.step}" + (f" of epoch {turn.epoch}" if turn.epoch else "")
        opening = turn.update is None
        joined, active = self._turns.arrive(
            key, turn.rank, turn, lambda: self._expected(opening=opening)
        )
        # Outside the round, each trainer on its own thread. The rows cannot change meanwhile: the
        # next update needs a turn of this caller, who takes it after this answer.
        return TurnAnswer(self.lookup(turn.lookups), joined, active)

    def close_epoch(self, rank: int, epoch: int) -> tuple[int, ...]:
        """Wait until every trainer has ended the epoch; the ranks of its last round."""
        return self._closings.arrive(f"the end of epoch {epoch}", rank, None, lambda: self._all)

    def read(self, slab: int, what: str, rows: Tensor) -> Tensor:
        return self._slabs[slab].read(what, rows)

    def leave(self, rank: int, why: str) -> None:
        self._turns.leave(rank, why)
        self._closings.leave(rank, why)

    def _expected(self, *, opening: bool) -> Collection[int]:
        return self._all if opening or not self._active else self._active

    def _apply(self, turns: dict[int, Turn]) -> tuple[_Ranks, _Ranks]:
        """The update of one round: all trainers' gradients in rank order, one optimizer step."""
        updates = [turn.update for turn in turns.values() if turn.update is not None]
        for index, slab in enumerate(self._slabs):
            pushes = [push for update in updates for push in update.pushes[index]]
            if pushes:
                slab.apply(pushes, updates[0].lrs[index], len(updates))
        self._joined = tuple(turns)
        self._active = tuple(rank for rank, turn in turns.items() if turn.more)
        return self._joined, self._active
