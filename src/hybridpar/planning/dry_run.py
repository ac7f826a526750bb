"""Some steps of every trainer of a job that is not there: what each would send and ask for.

Shapes: N ids.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from hybridpar.errors import InputError
from hybridpar.features import FeatureValue
from hybridpar.messages import Lookups, SlabLookup
from hybridpar.planning.stand_ins import NoMaster, NoServer
from hybridpar.server.hosted import HostedModule
from hybridpar.sharding import Plan
from hybridpar.specs import RemoteEmbeddingSpec
from hybridpar.trainer.averaging import server_average
from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.looked_up import LookedUp
from hybridpar.trainer.model import HybridModel
from hybridpar.trainer.routing import RoutedBatch
from hybridpar.trainer.sparse_optimizer import SparseOptimizer

Sample: TypeAlias = "Iterable[Any] | Callable[..., Iterable[Any]]"
"""Batches of all trainers, or a function from a trainer's rank to its batches."""

_OWN_FORWARDS = 8  # so many trainers go through the model's forward; it may take long
Asked: TypeAlias = "dict[tuple[int, int], list[SlabLookup]]"
"""By server and slab, lookups."""


class IdsAlone(HybridModel[Mapping[str, FeatureValue]]):
    """A model of which only the tables are known: its batches are what `sparse_inputs` gives."""

    @override
    def sparse_inputs(self, batch: Mapping[str, FeatureValue]) -> Mapping[str, FeatureValue]:
        return batch

    @override
    def forward(self, embeddings: dict[str, Tensor], batch: Mapping[str, FeatureValue]) -> Tensor:
        return total(embeddings)


@dataclass
class DryRun:
    """What the steps of all trainers came to.

    Attributes:
        steps: how many steps each trainer took.
        sent: for each trainer, the bytes it sent to each server.
        received: for each trainer, the bytes that came from each server.
        asked: for each trainer and server, the lookups of its steps.
        ids: for each table, the ids of each batch.
        bags: for each table, how many bags they were in, all together.
        step_s: seconds of a trainer's own work, for each step of some.
        averaged: whether a server averages the dense gradients, so that they are among the bytes.
        server_s: seconds that each server's work in a step takes, as timed elsewhere.
    """

    steps: int = 0
    sent: list[list[int]] = field(default_factory=list)
    received: list[list[int]] = field(default_factory=list)
    asked: list[list[list[Lookups]]] = field(default_factory=list)
    ids: dict[str, list[Tensor]] = field(default_factory=dict)
    bags: dict[str, int] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    averaged: bool = False
    server_s: list[float] = field(default_factory=list)

    def asked_in(self, step: int) -> Asked:
        """All trainers' lookups of one step."""
        found: Asked = {}
        for by_server in self.asked:
            for server, steps in enumerate(by_server):
                for slab, lookup in enumerate(steps[step].slabs if step < len(steps) else ()):
                    if lookup is not None:
                        found.setdefault((server, slab), []).append(lookup)
        return found


def dry_run(
    model: HybridModel[Any],
    sample: Sample,
    *,
    trainers: int,
    plan: Plan,
    modules: dict[str, HostedModule],
    steps: int,
    connect: Mapping[str, Any],
) -> DryRun:
    """Take a few steps as every trainer of a job, against servers that only count.

    Args:
        model: the model; it is left as it is.
        sample: the batches.
        trainers: how many trainers the job has.
        plan: where the tables are.
        modules: the hosted modules, by name.
        steps: at most so many a trainer.
        connect: arguments of :meth:`HybridModel.connect`.

    Raises:
        InputError: if there is no batch, or an id is out of range.
    """
    model = _own_copy(model)
    model.train()
    run = DryRun()
    used: set[str] = set()
    with torch.random.fork_rng(devices=[]):
        for rank in range(trainers):
            batches = _batches_of(sample, rank, steps)
            run.steps = max(run.steps, len(batches))
            servers = [
                NoServer(f"ps{number}", layouts, modules, trainers, connect["wire_dtype"])
                for number, layouts in enumerate(plan.slabs)
            ]
            ctx = TrainerContext(
                rank=rank,
                num_trainers=trainers,
                device=torch.device("cpu"),
                master=NoMaster(trainers, len(servers), modules),
                servers=list(servers),
                shares_memory=False,
            )
            optimizer = model.connect(ctx, **connect)
            steps_of_one = _Steps(model, optimizer, run, used)
            steps_of_one.take(batches, own_forward=rank < _OWN_FORWARDS)
            run.sent.append([server.sent for server in servers])
            run.received.append([server.received for server in servers])
            run.asked.append([server.asked for server in servers])
    return run


def _own_copy(model: HybridModel[Any]) -> HybridModel[Any]:
    """A copy that is not connected: buffers and gradients of the caller's stay as they are."""
    connection = (model._tables, model._exchange, model._sparse_optimizer)
    memo: dict[int, Any] = {id(part): None for part in connection}
    memo[id(model.specs)] = model.specs  # which may have values of a table's size
    return copy.deepcopy(model, memo)


def _batches_of(sample: Sample, rank: int, steps: int) -> Sequence[Any]:
    """A trainer's batches: its own, or everybody's, from another one on."""
    if callable(sample):
        found = _some(sample(rank), steps)
    else:
        found = _some(sample, steps)
        first = rank % max(1, len(found))
        found = found[first:] + found[:first]
    if not found:
        raise InputError(f"The sample has no batch for trainer{rank}. Give at least one.")
    return found


def _some(batches: Iterable[Any], steps: int) -> list[Any]:
    return [batch for batch, _ in zip(batches, range(steps), strict=False)]


class _Steps:
    """One trainer's steps, taken as `trainer.steps.Steps` takes them.

    Args:
        model: connected.
        optimizer: what `connect` gave.
        run: takes note of them.
        used: features whose embeddings the model's output depends on; more are added.
    """

    def __init__(
        self, model: HybridModel[Any], optimizer: SparseOptimizer, run: DryRun, used: set[str]
    ) -> None:
        self._model = model
        self._exchange = model._connected_exchange
        self._optimizer = optimizer
        self._run = run
        self._used = used
        self._pushed = False
        averaging = server_average(
            "auto", model, model._connected, scaled=False, non_finite="raise", ddp={},
            comm_hook=None,
        )  # fmt: skip
        self._dense: Tensor | None = None  # what stands for the dense half's gradients
        if averaging is not None:
            self._dense = torch.zeros(sum(p.numel() for p in model.parameters() if p.requires_grad))
        run.averaged = averaging is not None

    def take(self, batches: Sequence[Any], *, own_forward: bool) -> None:
        """An epoch of some batches.

        Args:
            batches: its batches.
            own_forward: whether to go through the model's own forward, and take the time; else
                through a sum of the embeddings that were used so far.
        """
        routed = self._route(batches[0], ahead=0)
        current = self._exchange.open(routed)
        for batch, after in itertools.zip_longest(batches, batches[1:]):
            started = time.perf_counter()
            following = None if after is None else self._route(after, ahead=1)
            self._exchange.announce(following)
            embeddings = self._model._embed(routed, current.pooled, batch)
            if own_forward:
                loss = total(self._model(embeddings, batch))
            else:
                loss = total([embeddings[name] for name in self._used & embeddings.keys()])
            self._pushed = False
            early = None if self._exchange.clips_norms else self._push
            with self._optimizer.when_complete(early):
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
            if not self._pushed:
                self._push()
            self._model.zero_grad()
            if own_forward:
                self._run.step_s.append(time.perf_counter() - started)
            current = self._exchange.complete()
            routed = routed if following is None else following
        self._exchange.close()

    def _route(self, batch: Any, *, ahead: int) -> RoutedBatch:
        routed = self._model._route(batch, ahead=ahead)
        for table, ids, num_bags in routed.tables_ids():
            self._run.ids.setdefault(table, []).append(ids)
            self._run.bags[table] = self._run.bags.get(table, 0) + num_bags
        return routed

    def _push(self) -> None:
        self._pushed = True
        gradients = self._optimizer.gradients(dense=self._dense)
        for each in gradients.looked_up:
            self._used.update(_features(self._model.specs, each))
        self._exchange.send(gradients)
        self._optimizer.pushed()


def _features(specs: Sequence[RemoteEmbeddingSpec], looked_up: LookedUp) -> set[str]:
    """The features that a backward pass reached."""
    if looked_up.slab < 0:
        return set(next(spec.features for spec in specs if spec.name == looked_up.module[0]))
    pairs = zip(looked_up.pieces, looked_up.gradients(), strict=True)
    return {piece.feature for piece, grad in pairs if grad is not None}


def total(output: object) -> Tensor:
    """The sum of all float values in a tensor, mapping or sequence: something to differentiate."""
    if isinstance(output, Tensor):
        values = output.values() if output.is_nested else output
        return values.sum() if values.is_floating_point() else torch.zeros(())
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        return sum(map(total, output), torch.zeros(()))
    return torch.zeros(())
