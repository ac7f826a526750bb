"""A feature's bags cut into pieces as its table is, and put together again.

Shapes: N ids, B bags of a feature, S the bags that one shard takes part in, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridpar.features import Bags, CheckedFeature, count_before
from hybridpar.kernels import shifted
from hybridpar.messages import SlabLookup
from hybridpar.sharding import Placement
from hybridpar.specs import RemoteEmbeddingSpec
from hybridpar.trainer.pooling import asked_of_servers


@dataclass(frozen=True, slots=True)
class Piece:
    """What one shard contributes to one feature.

    Attributes:
        feature: the feature.
        server: rank of the server.
        slab: index of the slab there.
        first_row: where the shard begins in the slab.
        rows: (N,) rows of the shard.
        offsets: (S,) where each bag begins among them; None if each has one.
        bags: (S,) which of the feature's bags these are; None if all of them, in order.
    """

    feature: str
    server: int
    slab: int
    first_row: int
    rows: Tensor
    offsets: Tensor | None
    bags: Tensor | None

    @property
    def num_bags(self) -> int:
        """S."""
        return (self.rows if self.offsets is None else self.offsets).numel()

    def lookup(self) -> SlabLookup:
        """The piece alone, as a lookup."""
        return join([self])


def cut(feature: str, bags: Bags, placement: Placement) -> list[Piece]:
    """One feature's bags, cut as its table is."""
    pieces = []
    for index, shard in enumerate(placement.shards):
        rows, offsets, which = bags.indices, bags.given, None
        if placement.num_row_shards > 1:
            rows, offsets, which = _dealt(bags, index, placement.num_row_shards)
        pieces.append(
            Piece(feature, shard.server, shard.slab, shard.first_row, rows, offsets, which)
        )
    return pieces


def _dealt(bags: Bags, index: int, num_shards: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The ids of one row shard as rows of the shard, and the bags that they lie in."""
    mine = bags.indices.remainder(num_shards) == index
    rows = bags.indices[mine].div_(num_shards, rounding_mode="floor")
    if bags.one_each:
        return rows, None, mine.nonzero().squeeze(1)
    # The ids of this shard before each bag's start and end, hence how many lie in the bag.
    before = count_before(mine)
    starts = before[bags.offsets]
    lengths = before[bags.offsets + bags.lengths()] - starts
    which = lengths.nonzero().squeeze(1)
    if which.numel() == bags.num_bags:
        return rows, starts, None
    return rows, starts[which], which


def join(pieces: Sequence[Piece]) -> SlabLookup:
    """Several pieces of one slab as one lookup."""
    rows = shifted([(piece.rows, piece.first_row) for piece in pieces])
    if all(piece.offsets is None for piece in pieces):
        return SlabLookup(rows, None)
    offsets, before = [], 0
    for piece in pieces:
        own = torch.arange(piece.num_bags) if piece.offsets is None else piece.offsets
        offsets.append((own, before))
        before += piece.rows.numel()
    return SlabLookup(rows, shifted(offsets))


def combine(
    spec: RemoteEmbeddingSpec,
    checked: CheckedFeature,
    placement: Placement,
    parts: list[tuple[Piece, Tensor]],
    device: torch.device,
) -> Tensor:
    """Put the shards' contributions to one feature together, in the order of the shards."""
    if placement.sharding == "column_wise":
        return torch.cat([rows for _, rows in parts], dim=1)
    total: Tensor | None = None
    for piece, rows in parts:
        if piece.bags is None:
            total = rows if total is None else total + rows
        else:
            num_bags = asked_of_servers(spec, checked).num_bags
            base = (
                torch.zeros(num_bags, spec.embedding_dim, device=device) if total is None else total
            )
            total = base.index_add(0, piece.bags.to(device), rows)
    assert total is not None
    return total
