"""Which server keeps what: the words that a plan is written in.

A server lays all the table shards that are updated alike (of one width, dtype and optimizer) into
one matrix, a *slab*, so that one call reads or updates all of them at once. Sharding says how a
table is cut:

* table-wise: whole, on one server;
* row-wise: its rows are dealt out like cards: shard ``k`` of ``n`` holds the logical rows ``k,
  k + n, k + 2n, …``. Vocabularies are mostly sorted by frequency; dealt out, the hot ids spread
  evenly, which contiguous ranges would not do;
* column-wise: every shard holds some of the columns of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hybridpar.optim import SparseOptimizerSettings
from hybridpar.specs import Sharding


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of one table on one server.

    Attributes:
        server: rank of the server.
        slab: index of the slab on that server.
        first_row: where the shard begins in the slab.
        num_rows: how many rows it has there.
        first_column: the first of the table's columns in it.
        num_columns: how many of them.
    """

    server: int
    slab: int
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one table is, how it is cut, and why so, in words."""

    table: str
    sharding: Sharding
    shards: tuple[Shard, ...]
    why: str = ""

    @property
    def num_row_shards(self) -> int:
        """Into how many parts the rows are dealt: 1 unless row-wise."""
        return len(self.shards) if self.sharding == "row_wise" else 1


@dataclass(frozen=True, slots=True)
class SlabPart:
    """One shard as its server sees it: the slab's rows ``first_row`` and on.

    They are the table's logical rows ``row_shard, row_shard + num_row_shards, …``, from
    ``first_column`` on.
    """

    table: str
    row_shard: int
    num_row_shards: int
    first_column: int
    first_row: int
    num_rows: int


class SlabKind(NamedTuple):
    """What the shards in one slab have in common."""

    num_columns: int
    dtype: torch.dtype
    settings: SparseOptimizerSettings
    max_norm: float | None
    norm_type: float
    alone: str  # a table's name if its slab must hold no other table, else empty


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """One slab of one server: the shards that lie in it, one after another."""

    kind: SlabKind
    parts: tuple[SlabPart, ...]

    @property
    def num_rows(self) -> int:
        """How many rows the slab has, all shards together."""
        return sum(part.num_rows for part in self.parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole placement.

    Attributes:
        placements: for each table's name, where it is.
        slabs: for each server, its slabs.
        modules: for each hosted module's name, its server.
        num_bytes: for each server, bytes of the tables' weights and optimizer state.
        ids_a_sample: for each server, ids that it is asked for in a sample on average, as far as
            the specs tell.
    """

    placements: dict[str, Placement]
    slabs: tuple[tuple[SlabLayout, ...], ...]
    num_bytes: tuple[int, ...]
    ids_a_sample: tuple[float, ...]
    modules: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """A line a table, and a line a server."""
        lines = []
        for placement in self.placements.values():
            servers = ", ".join(_describe(placement, shard) for shard in placement.shards)
            lines.append(f"table {placement.table}: {placement.sharding} on {servers}")
        lines += [f"module {name}: on ps{server}" for name, server in self.modules.items()]
        lines += [
            f"ps{rank}: {size:,} bytes, {ids:.1f} ids a sample"
            for rank, (size, ids) in enumerate(zip(self.num_bytes, self.ids_a_sample, strict=True))
        ]
        return "\n".join(lines)


def _describe(placement: Placement, shard: Shard) -> str:
    if placement.sharding == "column_wise":
        last = shard.first_column + shard.num_columns - 1
        return f"ps{shard.server} (columns {shard.first_column} to {last})"
    return f"ps{shard.server} ({shard.num_rows:,} rows)"
