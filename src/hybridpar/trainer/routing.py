"""From a batch's features to lookups a server, and from the servers' rows to embeddings.

Shapes: N ids, B bags of a feature, S the bags that one shard takes part in, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from hybridpar.errors import InputError
from hybridpar.features import Bags, FeatureValue, to_bags
from hybridpar.messages import Lookups, Pooled, SlabLookup
from hybridpar.sharding import Plan, Shard
from hybridpar.specs import RemoteEmbeddingSpec, specs_by_feature

Watch: TypeAlias = Callable[[int, int, SlabLookup, Tensor], None]
"""Called with (server, slab, what was looked up, the rows that came as an autograd leaf)."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one shard contributes to one feature.

    ``bags`` (S,) says which of the feature's bags it has ids of; None means all of them.
    """

    feature: str
    num_bags: int
    bags: Tensor | None


class RoutedBatch:
    """One batch's lookups: what each server is asked, and how its answers become embeddings."""

    def __init__(self, layout: Sequence[int]) -> None:
        self._indices: list[list[list[Tensor]]] = [[[] for _ in range(n)] for n in layout]
        self._lengths: list[list[list[Tensor | int]]] = [[[] for _ in range(n)] for n in layout]
        self._pieces: list[list[list[_Piece]]] = [[[] for _ in range(n)] for n in layout]
        self._features: dict[str, tuple[RemoteEmbeddingSpec, Bags]] = {}
        self.lookups: tuple[Lookups, ...] = ()

    def add(self, feature: str, spec: RemoteEmbeddingSpec, bags: Bags, shards: list[Shard]) -> None:
        """Take one feature's bags in."""
        self._features[feature] = spec, bags
        for index, shard in enumerate(shards):
            if len(shards) == 1:
                rows, piece = bags.indices, _Piece(feature, bags.num_bags, None)
                lengths: Tensor | int = bags.num_bags if bags.one_each else bags.lengths()
            else:
                rows, lengths, piece = _split(feature, bags, index, len(shards))
            if shard.first_row:
                rows = rows + shard.first_row
            self._indices[shard.server][shard.slab].append(rows)
            self._lengths[shard.server][shard.slab].append(lengths)
            self._pieces[shard.server][shard.slab].append(piece)

    def seal(self) -> None:
        """Join what was taken in to one lookup a slab."""
        self.lookups = tuple(
            tuple(map(_lookup, indices, lengths))
            for indices, lengths in zip(self._indices, self._lengths, strict=True)
        )
        self._indices.clear()
        self._lengths.clear()

    def embeddings(
        self, pooled: Sequence[Pooled], device: torch.device, watch: Watch | None
    ) -> dict[str, Tensor]:
        """The embeddings of the batch, by feature: (B, D), on ``device``.

        Args:
            pooled: for each server, its answer to :attr:`lookups`.
            device: where the embeddings are wanted.
            watch: called with every tensor that a server sent, as an autograd leaf whose gradient
                is exactly what is to be pushed; None if no gradient is wanted.
        """
        parts: dict[str, list[tuple[_Piece, Tensor]]] = {name: [] for name in self._features}
        for server, answer in enumerate(pooled):
            for slab, rows in enumerate(answer):
                lookup = self.lookups[server][slab]
                if rows is None or lookup is None:
                    continue
                leaf = rows.to(device)
                if watch is not None:
                    watch(server, slab, lookup, leaf.requires_grad_())
                pieces = self._pieces[server][slab]
                # One split, not a slice a feature: its backward joins the gradients in one go.
                split = torch.split(leaf, [piece.num_bags for piece in pieces])
                for piece, piece_rows in zip(pieces, split, strict=True):
                    parts[piece.feature].append((piece, piece_rows))
        return {
            feature: _combine(spec, bags, parts[feature], device)
            for feature, (spec, bags) in self._features.items()
        }


class Router:
    """Knows a model's specs and plan; checks a batch's features and routes their ids."""

    def __init__(self, specs: tuple[RemoteEmbeddingSpec, ...], plan: Plan) -> None:
        self._by_feature = specs_by_feature(specs)
        self._shards = {name: list(placement.shards) for name, placement in plan.placements.items()}
        self._layout = [len(slabs) for slabs in plan.slabs]

    def route(self, inputs: Mapping[str, FeatureValue], where: str) -> RoutedBatch:
        """Check the features of one batch and split their ids by server and slab.

        Args:
            inputs: what ``sparse_inputs`` returned.
            where: who is asking and in which step, for messages.

        Raises:
            InputError: see :func:`hybridpar.features.to_bags`; also if a feature is unknown.
        """
        if not isinstance(inputs, Mapping):
            raise InputError(
                f"sparse_inputs on {where} returned a {type(inputs).__name__}. Return a dict from "
                "feature names to ids."
            )
        batch = RoutedBatch(self._layout)
        for feature, value in inputs.items():
            spec = self._by_feature.get(feature)
            if spec is None:
                known = ", ".join(map(repr, self._by_feature))
                raise InputError(
                    f"sparse_inputs on {where} gave feature '{feature}', which no spec names. "
                    f"The specs name {known}."
                )
            batch.add(feature, spec, to_bags(feature, spec, value, where), self._shards[spec.name])
        batch.seal()
        return batch


def _split(
    feature: str, bags: Bags, index: int, num_shards: int
) -> tuple[Tensor, Tensor | int, _Piece]:
    """The ids of one shard as rows of the shard, and the bags that they lie in."""
    mine = bags.indices.remainder(num_shards) == index
    rows = bags.indices[mine].div_(num_shards, rounding_mode="floor")
    if bags.one_each:
        which = mine.nonzero().squeeze(1)
        return rows, rows.numel(), _Piece(feature, rows.numel(), which)
    # The ids of this shard before each bag's start and end, hence how many lie in the bag.
    before = torch.zeros(bags.indices.numel() + 1, dtype=torch.int64)
    torch.cumsum(mine, 0, out=before[1:])
    lengths = before[bags.offsets + bags.lengths()] - before[bags.offsets]
    which = lengths.nonzero().squeeze(1)
    if which.numel() == bags.num_bags:
        return rows, lengths, _Piece(feature, bags.num_bags, None)
    return rows, lengths[which], _Piece(feature, which.numel(), which)


def _lookup(indices: list[Tensor], lengths: list[Tensor | int]) -> SlabLookup | None:
    """One lookup from the pieces of a slab. A length that is a number means bags of one id."""
    if not indices:
        return None
    joined = indices[0] if len(indices) == 1 else torch.cat(indices)
    if all(isinstance(length, int) for length in lengths):
        return SlabLookup(joined, None)
    sizes = torch.cat(
        [
            torch.ones(length, dtype=torch.int64) if isinstance(length, int) else length
            for length in lengths
        ]
    )
    return SlabLookup(joined, sizes.cumsum(0) - sizes)


def _combine(
    spec: RemoteEmbeddingSpec,
    bags: Bags,
    parts: list[tuple[_Piece, Tensor]],
    device: torch.device,
) -> Tensor:
    """Add up the shards' contributions to one feature, in the order of the shards."""
    total: Tensor | None = None
    for piece, rows in parts:
        if piece.bags is not None:
            base = rows.new_zeros(bags.num_bags, spec.embedding_dim) if total is None else total
            total = base.index_add(0, piece.bags.to(device), rows)
        else:
            total = rows if total is None else total + rows
    if total is None:
        return torch.zeros(bags.num_bags, spec.embedding_dim, device=device)
    if spec.mode == "mean" and not bags.one_each:
        total = total / bags.lengths().clamp_(min=1).unsqueeze(1).to(device)
    return total
