"""From a batch's features to lookups a server, and from the servers' rows to embeddings.

Shapes: N ids, B bags of a feature, S the bags that one shard takes part in, D columns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from hybridpar.errors import InputError
from hybridpar.features import CheckedFeature, FeatureValue, check
from hybridpar.messages import Lookups, ModuleCall, Pooled
from hybridpar.sharding import Placement, Plan
from hybridpar.specs import RemoteEmbeddingSpec, specs_by_feature
from hybridpar.trainer.looked_up import LookedUp
from hybridpar.trainer.pieces import Piece, combine, cut, join
from hybridpar.trainer.pooling import asked_of_servers, finish

Watch: TypeAlias = Callable[[LookedUp], None]
"""Called with what was looked up, before a gradient can come for it."""


class RoutedBatch:
    """One batch's lookups: what each server is asked, and how its answers become embeddings."""

    def __init__(
        self,
        lookups: tuple[Lookups, ...],
        pieces: dict[tuple[int, int], list[Piece]],
        features: dict[str, tuple[RemoteEmbeddingSpec, CheckedFeature, Placement]],
        modules: tuple[str, ...],
        released: list[list[tuple[str, int]]],
    ) -> None:
        self._released = released
        self.lookups = lookups
        self.tables = {spec.name for spec, _, _ in features.values()}.union(modules)
        self._pieces = pieces
        self._features = features

    @property
    def number(self) -> int:
        """Counts this trainer's batches."""
        return self.lookups[0].number

    @property
    def learns_weights(self) -> bool:
        """Whether any per-sample weights want a gradient."""
        return any(
            checked.weights is not None and checked.weights.requires_grad
            for _, checked, _ in self._features.values()
        )

    def abandon(self) -> None:
        """No gradient will come for it: hosted modules' graphs may go."""
        for released, lookups in zip(self._released, self.lookups, strict=True):
            released += [(call.module, call.number) for call in lookups.modules if call.keep]

    def table_of(self, feature: str) -> str:
        """The name of the table that a feature reads."""
        return self._features[feature][0].name

    def tables_ids(self) -> list[tuple[str, Tensor, int]]:
        """For each feature of a table: the table, the (N,) ids, and in how many bags they are."""
        return [
            (spec.name, checked.bags.indices, checked.bags.num_bags)
            for spec, checked, _ in self._features.values()
        ]

    def refresh(self, inputs: Mapping[str, FeatureValue]) -> None:
        """Take the per-sample weights from ``sparse_inputs`` called anew.

        A batch is routed while the one before it is computed; weights that a parameter makes must
        come from the parameter as it is afterwards. The ids stay.
        """
        for feature, (spec, checked, placement) in self._features.items():
            if checked.weights is not None:
                given = inputs.get(feature)
                again = None if given is None else check(feature, spec, given, "this trainer")
                if again is None or not torch.equal(again.bags.indices, checked.bags.indices):
                    raise InputError(
                        f"sparse_inputs gave feature '{feature}' other ids when called again for "
                        "the same batch. Draw what is random when the batch is made."
                    )
                self._features[feature] = spec, again, placement

    def embeddings(
        self, pooled: Sequence[Pooled], device: torch.device, watch: Watch | None,
        frozen: set[str],
    ) -> dict[str, Tensor]:  # fmt: skip
        """The embeddings of the batch, by feature, on ``device``.

        Args:
            pooled: for each server, its answer to :attr:`lookups`.
            device: where the embeddings are wanted.
            watch: called with what was looked up of every slab and hosted module, whose gradient
                is exactly what is to be pushed; None if no gradient is wanted.
            frozen: tables and modules that get none.
        """
        parts: dict[str, list[tuple[Piece, Tensor]]] = {name: [] for name in self._features}
        for (server, slab), pieces in self._pieces.items():
            values = pooled[server].slabs[slab]
            assert values is not None
            values = values.to(device, torch.float32)
            sizes = [piece.num_bags for piece in pieces]
            trained = [self._features[p.feature][0].name not in frozen for p in pieces]
            if watch is not None and any(trained):
                looked_up = LookedUp(self, server, slab, pieces=pieces)
                watch(looked_up)
                split = looked_up.embed(values, sizes, trained)
            else:
                split = torch.split(values, sizes)
            for piece, rows in zip(pieces, split, strict=True):
                parts[piece.feature].append((piece, rows))
        found = {
            feature: finish(
                spec, checked, combine(spec, checked, placement, parts[feature], device)
            )
            for feature, (spec, checked, placement) in self._features.items()
        }
        for server, answer in enumerate(pooled):
            lookups = self.lookups[server]
            for call, output in zip(lookups.modules, answer.modules, strict=True):
                output = output.to(device)
                if watch is not None and call.keep:
                    key = call.module, call.number
                    looked_up = LookedUp(self, server, -1, module=key)
                    watch(looked_up)
                    weakref.finalize(looked_up, self._released[server].append, key)
                    (output,) = looked_up.embed(output, [1], [True])
                found[call.feature] = output
        return found


class Router:
    """Knows a model's specs and plan; checks a batch's features and routes their ids."""

    def __init__(self, specs: tuple[RemoteEmbeddingSpec, ...], plan: Plan, rank: int) -> None:
        self._by_feature = specs_by_feature(specs)
        self._plan = plan
        self._rank = rank
        self._calls = 0
        self._batches = 0
        self._released: list[list[tuple[str, int]]] = [[] for _ in plan.slabs]

    def route(
        self, inputs: Mapping[str, FeatureValue], where: str, *, train: bool, frozen: set[str]
    ) -> RoutedBatch:
        """Check the features of one batch and split their ids by server and slab.

        Args:
            inputs: what ``sparse_inputs`` returned.
            where: who is asking and for which step, for messages.
            train: whether hosted modules run in training mode. They keep their graphs if
                gradients are enabled.
            frozen: tables and modules that get no gradient.

        Raises:
            InputError: see :func:`hybridpar.features.check`; also if a feature is unknown.
        """
        if not isinstance(inputs, Mapping):
            raise InputError(
                f"sparse_inputs on {where} returned a {type(inputs).__name__}. Return a dict from "
                "feature names to ids."
            )
        self._batches += 1
        pieces: dict[tuple[int, int], list[Piece]] = {}
        features: dict[str, tuple[RemoteEmbeddingSpec, CheckedFeature, Placement]] = {}
        calls: list[list[ModuleCall]] = [[] for _ in self._plan.slabs]
        for feature, value in inputs.items():
            spec = self._spec_of(feature, where)
            if spec.module is not None:
                keep = torch.is_grad_enabled() and spec.name not in frozen
                call = self._module_call(feature, spec, value, where, train=train, keep=keep)
                calls[self._plan.modules[spec.name]].append(call)
                continue
            checked = check(feature, spec, value, where)
            placement = self._plan.placements[spec.name]
            features[feature] = spec, checked, placement
            for piece in cut(feature, asked_of_servers(spec, checked), placement):
                pieces.setdefault((piece.server, piece.slab), []).append(piece)
        for of_slab in pieces.values():  # by table, as they lie in memory
            of_slab.sort(key=lambda piece: piece.first_row)
        lookups = tuple(
            Lookups(
                self._rank,
                self._batches,
                tuple(
                    join(pieces[server, slab]) if (server, slab) in pieces else None
                    for slab in range(len(slabs))
                ),
                tuple(calls[server]),
                self._take_released(server),
            )
            for server, slabs in enumerate(self._plan.slabs)
        )
        modules = tuple(call.module for of_server in calls for call in of_server)
        return RoutedBatch(lookups, pieces, features, modules, self._released)

    def _take_released(self, server: int) -> tuple[tuple[str, int], ...]:
        """Calls of hosted modules whose outputs are gone by now: their graphs may go too."""
        released = tuple(self._released[server])
        del self._released[server][: len(released)]
        return released

    def _spec_of(self, feature: str, where: str) -> RemoteEmbeddingSpec:
        spec = self._by_feature.get(feature)
        if spec is None:
            known = ", ".join(map(repr, self._by_feature)) or "none"
            raise InputError(
                f"sparse_inputs on {where} gave feature {feature!r}, which no spec names. The "
                f"specs name {known}: add it to a spec's features=, or leave it out."
            )
        return spec

    def _module_call(
        self, feature: str, spec: RemoteEmbeddingSpec, value: object, where: str, *, train: bool,
        keep: bool,
    ) -> ModuleCall:  # fmt: skip
        inputs = value if isinstance(value, tuple) else (value,)
        for part in inputs:
            if not isinstance(part, Tensor):
                raise InputError(
                    f"Feature '{feature}' on {where} has a {type(part).__name__} among the inputs "
                    f"of module '{spec.name}'. Give a tensor, or a tuple of tensors."
                )
            if part.is_nested:
                raise InputError(
                    f"Feature '{feature}' on {where}: an input of module '{spec.name}' is a nested "
                    "tensor. Pass its values() and offsets()."
                )
            if part.requires_grad:
                raise InputError(
                    f"Feature '{feature}' on {where}: an input of module '{spec.name}' requires a "
                    "gradient, which does not come back from the server. Pass input.detach()."
                )
        counts = train or keep  # or else an evaluation would change what training draws
        self._calls += counts
        return ModuleCall(spec.name, feature, inputs, train, self._calls if counts else 0, keep)
