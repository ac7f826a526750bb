"""`Master`: places each model's tables, calls the roll where no server does, and ends the job."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Collection
from typing import Any

from hybridpar.errors import HybridParError
from hybridpar.gather import Gather
from hybridpar.messages import ModelRequest, PlacedModel, ServedModel, TurnAnswer
from hybridpar.optim import SparseOptimizerSettings
from hybridpar.planner import check_memory, make_plan
from hybridpar.rollcall import RollCall
from hybridpar.sharding import Plan
from hybridpar.transport import Peer

_logger = logging.getLogger("hybridpar")


class Master:
    """The job's one coordinator.

    Its calls, by name: ``place`` and ``finish``, at the start and the end; ``take_turn`` and
    ``gather``, which say who takes part in a step where updates are applied on arrival and no
    server gathers the trainers; ``compare``, ``gather`` and ``touch``, around an evaluation.

    Args:
        num_trainers: how many trainers there are.
        connect: gives the connections to the servers, in rank order.
        timeout_s: longest wait for the last trainer to ask, in seconds.
    """

    def __init__(
        self, num_trainers: int, connect: Callable[[], list[Peer]], timeout_s: float
    ) -> None:
        self._connect = connect
        self._timeout_s = timeout_s
        self._rounds: dict[int, RollCall] = {}
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
        if method == "take_turn":
            model_id, turn = args
            joined, active, _ = self._rounds[model_id].arrive(turn, opens=turn.step == 0)
            return TurnAnswer(joined, active)
        if method == "gather":
            model_id, rank, where = args
            return self._rounds[model_id].gather(rank, where)
        if method == "compare":
            model_id, rank, where, value = args
            return self._rounds[model_id].compare(rank, where, value)
        if method == "touch":
            self._rounds[args[0]].touch()
            return None
        raise HybridParError(f"master has no call '{method}' (asked by {peer}).")

    def lose(self, peer: str, why: str) -> None:
        """A trainer's connection has ended, and it will not come any more."""
        rank = int(peer.removeprefix("trainer"))
        self._requests.leave(rank, f"{peer} {why}")
        for rounds in self._rounds.values():
            rounds.leave(rank, f"{peer} {why}")
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
                    "trainer must build the same tables, optimizers and consistency."
                )
        servers = self._connect()
        try:
            plan = make_plan(first.specs, len(servers))
            check_memory(plan, [server.call("room") for server in servers])
            self._models += 1
            _logger.info("model %d is placed:\n%s", self._models, plan)
            replies = [
                server.send("create", self._served(rank, plan, first))
                for rank, server in enumerate(servers)
            ]
            module_lrs = {name: lrs for reply in replies for name, lrs in reply.wait().items()}
        finally:
            for server in servers:
                server.close()
        self._rounds[self._models] = RollCall(
            "master", len(self._trainers), self._timeout_s, lambda _: None
        )
        return PlacedModel(self._models, plan, module_lrs)

    def _served(self, rank: int, plan: Plan, request: ModelRequest) -> ServedModel:
        """What one server holds of a model."""
        layouts = plan.slabs[rank]
        modules = tuple(name for name, server in plan.modules.items() if server == rank)
        names = {part.table for layout in layouts for part in layout.parts}.union(modules)
        return ServedModel(
            model_id=self._models,
            specs=tuple(spec for spec in request.specs if spec.name in names),
            layouts=layouts,
            modules=modules,
            request=dataclasses.replace(request, specs=()),
            num_trainers=len(self._trainers),
        )


# Values that need not be equal to be the same once they have crossed from another process.
_INCOMPARABLE = ("init", "module", "args", "kwargs")


def _difference(first: ModelRequest, other: ModelRequest) -> str:
    """What two requests disagree on, seeds left aside; empty if nothing."""
    for name in ("asynchronous", "staleness", "divide", "wire_dtype"):
        values = getattr(first, name), getattr(other, name)
        if values[0] != values[1]:
            return f"{name} {values[0]!r} against {values[1]!r}"
    names = [spec.name for spec in first.specs]
    other_names = [spec.name for spec in other.specs]
    if names != other_names:
        return f"tables {names} against {other_names}"
    for mine, theirs in zip(first.specs, other.specs, strict=True):
        for field in dataclasses.fields(mine):
            values = getattr(mine, field.name), getattr(theirs, field.name)
            if field.name in _INCOMPARABLE:
                continue
            if field.name == "optimizer" and not isinstance(values[0], SparseOptimizerSettings):
                continue
            if values[0] != values[1]:
                what = f"{field.name} {values[0]!r} against {values[1]!r}"
                return f"table '{mine.name}' has {what}"
    return ""
