"""Servers and a master that are not there: they count what is sent, and answer with zeros.

A trainer's own code runs against them, so what crosses a socket in a real job is counted by the
code that sends it, not by a second description of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from typing_extensions import override

from hybridpar.frames import pack
from hybridpar.messages import (
    Lookups,
    ModelRequest,
    PlacedModel,
    Pooled,
    Turn,
    TurnAnswer,
    Update,
)
from hybridpar.planner import make_plan
from hybridpar.server.hosted import HostedModule
from hybridpar.sharding import SlabLayout
from hybridpar.transport import Peer, Reply


class StandIn(Peer):
    """A peer whose calls are counted and answered here, at once.

    Attributes:
        sent: bytes that the calls would have put on the socket.
        received: bytes that the answers would have.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.about = ""
        self.sent = 0
        self.received = 0

    @override
    def send(self, method: str, *args: object, answers_little: bool = False) -> Reply:
        self.sent += num_bytes((method, args))
        reply = Reply(self, method, little=answers_little)
        reply.value = getattr(self, method)(*args)
        reply.done = True
        self.received += num_bytes(reply.value)
        return reply

    @override
    @contextmanager
    def patient(self) -> Iterator[None]:
        yield


def num_bytes(message: object) -> int:
    """The bytes of a message on a socket."""
    return sum(map(len, pack(message).parts))


class NoMaster(StandIn):
    """Stands in for the master: makes the plan, and lets every trainer go on.

    Args:
        num_trainers: how many trainers the planned job has.
        num_servers: how many servers.
        modules: the hosted modules, by name.
    """

    def __init__(
        self, num_trainers: int, num_servers: int, modules: dict[str, HostedModule]
    ) -> None:
        super().__init__("master")
        self._everyone = tuple(range(num_trainers))
        self._num_servers = num_servers
        self._modules = modules

    def place(self, request: ModelRequest) -> PlacedModel:
        """As the master places a model."""
        lrs = {name: module.lrs for name, module in self._modules.items()}
        return PlacedModel(1, make_plan(request.specs, self._num_servers), lrs)

    def take_turn(self, _: int, turn: Turn) -> TurnAnswer:
        """All trainers have as many batches as this one."""
        return TurnAnswer(self._everyone, self._everyone if turn.more else ())

    def gather(self, *_: object) -> tuple[int, ...]:
        """Everyone is here."""
        return self._everyone


class NoServer(StandIn):
    """Stands in for a server towards one trainer: its rows are zeros, its hosted modules real.

    Attributes:
        asked: the lookups of the steps, in order.
    """

    def __init__(
        self,
        name: str,
        layouts: Sequence[SlabLayout],
        modules: dict[str, HostedModule],
        num_trainers: int,
        wire_dtype: torch.dtype,
    ) -> None:
        super().__init__(name)
        self.asked: list[Lookups] = []
        self._layouts = layouts
        self._modules = modules
        self._everyone = tuple(range(num_trainers))
        self._wire_dtype = wire_dtype

    def take_turn(self, _: int, turn: Turn) -> TurnAnswer:
        """All trainers come, and have as many batches as this one."""
        if turn.update is not None:
            self._apply(turn.rank, turn.update)
        pooled = Pooled(tuple(None for _ in self._layouts))
        if turn.lookups is not None:
            pooled = self._rows(turn.lookups)
        active = self._everyone if turn.more else ()
        return TurnAnswer(self._everyone, active, pooled, turn.dense)

    def lookup(self, _: int, lookups: Lookups) -> Pooled:
        """Rows as they are now."""
        return self._rows(lookups)

    def lookup_for(self, _: int, __: int, lookups: Lookups) -> Pooled:
        """Rows for a step."""
        return self._rows(lookups)

    def push(self, _: int, rank: int, update: Update, __: int) -> None:
        """Gradients on their way to a table."""
        self._apply(rank, update)

    def gradient_squares(self, *_: object) -> tuple[float, ...]:
        """A number a slab."""
        return tuple(0.0 for _ in self._layouts)

    def leave(self, *_: object) -> None:
        """The trainer's updates are over."""

    def close_epoch(self, *_: object) -> tuple[int, ...]:
        """Everyone is here."""
        return self._everyone

    def _rows(self, lookups: Lookups) -> Pooled:
        self.asked.append(lookups)
        slabs = tuple(
            None
            if lookup is None
            else torch.zeros(
                (lookup.indices if lookup.offsets is None else lookup.offsets).numel(),
                layout.kind.num_columns,
                dtype=self._wire_dtype,
            )
            for lookup, layout in zip(lookups.slabs, self._layouts, strict=True)
        )
        for name, number in lookups.released:
            self._modules[name].release(lookups.rank, number)
        outputs = (
            self._modules[call.module].forward(lookups.rank, call) for call in lookups.modules
        )
        return Pooled(slabs, tuple(outputs))

    def _apply(self, rank: int, update: Update) -> None:
        for push in update.modules:
            module = self._modules[push.module]
            module.apply([(rank, [push])], 1, update.module_lrs[push.module])
