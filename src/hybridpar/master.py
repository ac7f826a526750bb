"""`Master`: places each model's tables on the servers, and knows when the job is over."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection
from typing import Any

from hybridpar.errors import HybridParError
from hybridpar.gather import Gather
from hybridpar.messages import ModelRequest, PlacedModel, ServedModel
from hybridpar.sharding import make_plan
from hybridpar.transport import Peer


class Master:
    """The job's one coordinator. It is asked at the start and at the end, never during a step.

    Its calls, by name: ``place``, ``finish``.

    Args:
        num_trainers: how many trainers there are.
        connect: gives the connections to the servers, in rank order.
        timeout_s: longest wait for the last trainer to ask, in seconds.
    """

    def __init__(
        self, num_trainers: int, connect: Callable[[], list[Peer]], timeout_s: float
    ) -> None:
        self._connect = connect
        self._trainers = range(num_trainers)
        self._requests: Gather[ModelRequest, PlacedModel | str] = Gather(
            "master", self._place, timeout_s
        )
        self._models = 0
        self._asked = dict.fromkeys(self._trainers, 0)
        self._finished: set[int] = set()
        self._left: set[int] = set()
        self._changed = threading.Condition()

    def handle(self, peer: str, method: str, args: tuple[Any, ...]) -> object:
        """Answer one call of one trainer."""
        if method == "place":
            (request,) = args
            number = self._asked[request.rank] = self._asked[request.rank] + 1
            return self._requests.arrive(f"model {number}", request.rank, request, self._everyone)
        if method == "finish":
            self._finish(*args)
            return None
        raise HybridParError(f"master has no call '{method}' (asked by {peer}).")

    def lose(self, peer: str, why: str) -> None:
        """A trainer's connection has ended, and it will not come any more."""
        rank = int(peer.removeprefix("trainer"))
        self._requests.leave(rank, f"{peer} {why}")
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def wait_until_finished(self) -> None:
        """Return when every trainer has finished and left, having told the servers to stop.

        However long training takes; the launcher ends the job if a process dies before.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._left) == len(self._trainers))
        for server in self._connect():
            server.call("stop")
            server.close()

    def _everyone(self) -> Collection[int]:
        return self._trainers

    def _finish(self, rank: int) -> None:
        """Note that a trainer is done, and let it go when all are."""
        self._requests.leave(rank, f"trainer{rank} has finished its train function")
        with self._changed:
            self._finished.add(rank)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._finished) == len(self._trainers))

    def _place(self, requests: dict[int, ModelRequest]) -> PlacedModel | str:
        """Plan the tables and have the servers make them; or say how the requests differ."""
        first = requests[0]
        for rank, request in requests.items():
            difference = _difference(first, request)
            if difference:
                return (
                    f"trainer0 and trainer{rank} build different models: {difference}. Every "
                    "trainer must build the same tables with the same sparse optimizer."
                )
        servers = self._connect()
        try:
            plan = make_plan(first.specs, len(servers), first.settings)
            self._models += 1
            replies = []
            for server, layouts in zip(servers, plan.slabs, strict=True):
                tables = {part.table for layout in layouts for part in layout.parts}
                served = ServedModel(
                    model_id=self._models,
                    specs=tuple(spec for spec in first.specs if spec.name in tables),
                    layouts=layouts,
                    settings=first.settings,
                    seed=first.seed,
                    num_trainers=len(requests),
                )
                replies.append(server.send("create", served))
            for reply in replies:
                reply.wait()
        finally:
            for server in servers:
                server.close()
        return PlacedModel(self._models, plan)


def _difference(first: ModelRequest, other: ModelRequest) -> str:
    """What two requests disagree on, seeds left aside; empty if nothing."""
    if first.settings != other.settings:
        return f"sparse optimizer {first.settings!r} against {other.settings!r}"
    names = [spec.name for spec in first.specs]
    other_names = [spec.name for spec in other.specs]
    if names != other_names:
        return f"tables {names} against {other_names}"
    for mine, theirs in zip(first.specs, other.specs, strict=True):
        for field in dataclasses.fields(mine):
            values = getattr(mine, field.name), getattr(theirs, field.name)
            if field.name != "init" and values[0] != values[1]:
                what = f"{field.name} {values[0]!r} against {values[1]!r}"
                return f"table '{mine.name}' has {what}"
    return ""
