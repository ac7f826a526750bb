"""Which server keeps which row: the plan. Pure functions of specs and counts.

A server lays all the table shards of one ``embedding_dim`` into one matrix, a *slab*, so that one
call reads or updates all of them at once. A logical row of a table is therefore found at

    server, slab, first row of its shard in the slab + its row in the shard

and a row-wise table deals its rows out like cards: shard ``k`` of ``n`` holds the logical rows
``k, k + n, k + 2n, …``. Vocabularies are mostly sorted by frequency; dealt out, the hot ids spread
evenly, which contiguous ranges would not do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridpar.errors import SpecError
from hybridpar.optim import SparseOptimizerSettings
from hybridpar.specs import RemoteEmbeddingSpec, Sharding

BYTES_PER_VALUE = 4  # float32


@dataclass(frozen=True, slots=True)
class Shard:
    """One table's rows on one server.

    Attributes:
        server: rank of the server.
        slab: index of the slab on that server.
        first_row: where the shard begins in the slab.
        num_rows: how many rows it has there.
    """

    server: int
    slab: int
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one table is: shard ``k`` of ``n`` holds the logical rows ``k, k + n, k + 2n, …``."""

    table: str
    sharding: Sharding
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class SlabPart:
    """One table's shard as the server sees it: its place in the slab, and which rows it holds."""

    table: str
    shard_index: int
    num_shards: int
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """One slab of one server: the shards that lie in it, one after another."""

    embedding_dim: int
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
        slabs: for each server, its slabs. A server without rows has none.
        num_bytes: for each server, bytes of weights and optimizer state.
    """

    placements: dict[str, Placement]
    slabs: tuple[tuple[SlabLayout, ...], ...]
    num_bytes: tuple[int, ...]

    def __str__(self) -> str:
        """A line a table, and a line a server."""
        lines = []
        for placement in self.placements.values():
            servers = ", ".join(
                f"ps{shard.server} ({shard.num_rows:,} rows)" for shard in placement.shards
            )
            lines.append(f"table {placement.table}: {placement.sharding} on {servers}")
        lines += [f"ps{rank}: {size:,} bytes" for rank, size in enumerate(self.num_bytes)]
        return "\n".join(lines)


def make_plan(
    specs: Sequence[RemoteEmbeddingSpec], num_servers: int, settings: SparseOptimizerSettings
) -> Plan:
    """Place every table so that the servers hold about equally many bytes.

    A table that its spec does not pin is spread row-wise if it alone is more than one server's
    fair share, else kept whole. Whole tables go, largest first, to the server that has least so
    far: the greedy rule for scheduling (Graham, "Bounds on Multiprocessing Timing Anomalies",
    1969), never more than 4/3 of the best balance.

    Args:
        specs: the tables, names unique.
        num_servers: how many servers there are, at least 1.
        settings: the sparse optimizer, whose state counts too.

    Raises:
        SpecError: if there is no table or no server.
    """
    if not specs or num_servers < 1:
        raise SpecError(f"Cannot place {len(specs)} tables on {num_servers} servers.")
    row_bytes = {spec.name: _row_bytes(spec, settings) for spec in specs}
    sizes = {spec.name: spec.num_embeddings * row_bytes[spec.name] for spec in specs}
    fair_share = sum(sizes.values()) / num_servers
    load = [0] * num_servers
    servers_of: dict[str, tuple[Sharding, list[int]]] = {}

    def place(spec: RemoteEmbeddingSpec, sharding: Sharding, servers: list[int]) -> None:
        servers_of[spec.name] = sharding, servers
        for index, server in enumerate(servers):
            load[server] += _shard_rows(spec, index, len(servers)) * row_bytes[spec.name]

    whole = []
    for spec in specs:
        spread = sizes[spec.name] > fair_share and num_servers > 1
        if spec.sharding == "row_wise" or (spec.sharding is None and spread):
            place(spec, "row_wise", list(range(min(num_servers, spec.num_embeddings))))
        else:
            whole.append(spec)
    for spec in sorted(whole, key=lambda spec: -sizes[spec.name]):
        place(spec, "table_wise", [min(range(num_servers), key=load.__getitem__)])
    return _lay_out(specs, servers_of, load)


def _row_bytes(spec: RemoteEmbeddingSpec, settings: SparseOptimizerSettings) -> int:
    state = sum(settings.state_widths(spec.embedding_dim).values())
    return (spec.embedding_dim + state) * BYTES_PER_VALUE


def _shard_rows(spec: RemoteEmbeddingSpec, index: int, num_shards: int) -> int:
    return len(range(index, spec.num_embeddings, num_shards))


def _lay_out(
    specs: Sequence[RemoteEmbeddingSpec],
    servers_of: dict[str, tuple[Sharding, list[int]]],
    num_bytes: list[int],
) -> Plan:
    """Give every shard its slab and its first row there, in the order of the specs."""
    parts: list[dict[int, list[SlabPart]]] = [{} for _ in num_bytes]  # server → dim → parts
    placements = {}
    for spec in specs:
        sharding, servers = servers_of[spec.name]
        shards = []
        for index, server in enumerate(servers):
            slab = parts[server].setdefault(spec.embedding_dim, [])
            first_row = sum(part.num_rows for part in slab[-1:]) + (
                slab[-1].first_row if slab else 0
            )
            num_rows = _shard_rows(spec, index, len(servers))
            slab.append(SlabPart(spec.name, index, len(servers), first_row, num_rows))
            slab_index = list(parts[server]).index(spec.embedding_dim)
            shards.append(Shard(server, slab_index, first_row, num_rows))
        placements[spec.name] = Placement(spec.name, sharding, tuple(shards))
    slabs = tuple(
        tuple(SlabLayout(dim, tuple(members)) for dim, members in by_dim.items())
        for by_dim in parts
    )
    return Plan(placements, slabs, tuple(num_bytes))
