"""`make_plan`: which server keeps what, from the specs alone. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from hybridpar.errors import SpecError
from hybridpar.messages import Room
from hybridpar.optim import SparseOptimizerSettings
from hybridpar.sharding import Placement, Plan, Shard, SlabKind, SlabLayout, SlabPart
from hybridpar.specs import RemoteEmbeddingSpec, Sharding

_FLOAT32_BYTES = 4
_ID_BYTES = 8
_LEAST_COLUMNS = 16  # narrower shards than these cost more in calls than they save


def make_plan(specs: Sequence[RemoteEmbeddingSpec], num_servers: int) -> Plan:
    """Place every table so that the servers hold about equally much.

    Counts bytes of weights and optimizer state; and, if any spec gives a ``pooling_factor``, the
    values that a sample reads, as a second half of the load. A table that its spec does not pin is
    kept whole unless it alone is more than one server's fair share of either; then it is spread
    row-wise or column-wise, whichever sends fewer bytes a sample. Whole tables go, largest first,
    to the server that has least so far: the greedy rule for scheduling (Graham, "Bounds on
    Multiprocessing Timing Anomalies", 1969), never more than 4/3 of the best balance. Hosted
    modules go round the servers, from the one that holds least on.

    Args:
        specs: the tables and modules, names unique, every table's ``optimizer`` filled in.
        num_servers: how many servers there are, at least 1.

    Raises:
        SpecError: if there is no server, or a table is pinned column-wise that cannot be.
    """
    if num_servers < 1:
        raise SpecError(f"Cannot place {len(specs)} tables on {num_servers} servers.")
    tables = [spec for spec in specs if spec.module is None]
    planner = _Planner(tables, num_servers)
    parts = {spec.name: planner.spread(spec) for spec in tables if planner.is_spread(spec)}
    whole = [spec for spec in tables if spec.name not in parts]
    for spec in sorted(whole, key=lambda spec: -planner.share(spec)):
        parts[spec.name] = planner.keep_whole(spec)
    hosted = [spec.name for spec in specs if spec.module is not None]
    least_first = sorted(range(num_servers), key=lambda rank: planner.num_bytes[rank])
    modules = {name: least_first[index % num_servers] for index, name in enumerate(hosted)}
    return _lay_out(tables, parts, planner, modules)


def check_memory(plan: Plan, rooms: Sequence[Room]) -> None:
    """Refuse a plan that needs more memory than its servers' machines have left.

    Args:
        plan: the plan.
        rooms: for each server, the memory of its machine. Servers of one machine share it.

    Raises:
        SpecError: names the servers, their largest tables, and the bytes.
    """
    machines: dict[str, list[int]] = {}
    for server, room in enumerate(rooms):
        machines.setdefault(room.machine, []).append(server)
    for servers in machines.values():
        left = [size for server in servers if (size := rooms[server].num_bytes) is not None]
        needed = sum(plan.num_bytes[server] for server in servers)
        if left and needed > min(left):
            names = " and ".join(f"ps{server}" for server in servers)
            raise SpecError(
                f"{_largest_tables(plan, servers)}: all tables on {names} need {needed:,} bytes "
                f"with their optimizer state, but {'their' if servers[1:] else 'its'} machine has "
                f"{min(left):,} bytes of memory left. Make them smaller: fewer rows or columns, "
                "dtype=torch.float16, an optimizer with less state such as RowWiseAdagrad; or use "
                "servers on more machines."
            )


def _largest_tables(plan: Plan, servers: Sequence[int]) -> str:
    """The tables that need most of some servers' memory, three at most, each with its bytes."""
    sizes: dict[str, int] = {}
    for server in servers:
        for slab in plan.slabs[server]:
            kind = slab.kind
            width = _row_bytes(kind.dtype, kind.settings, kind.num_columns)
            for part in slab.parts:
                sizes[part.table] = sizes.get(part.table, 0) + part.num_rows * width
    largest = sorted(sizes, key=lambda table: (-sizes[table], table))[:3]
    listed = ", ".join(f"'{table}' ({sizes[table]:,} bytes)" for table in largest)
    return f"Too little memory for table{'s' * (len(largest) > 1)} {listed}"


class _Part(NamedTuple):
    """A shard before it has its place in a slab."""

    server: int
    row_shard: int
    num_row_shards: int
    num_rows: int
    first_column: int
    num_columns: int


_Parts: TypeAlias = "tuple[Sharding, list[_Part], str]"  # the last says why


class _Planner:
    """Keeps count of what each server has so far."""

    def __init__(self, specs: Sequence[RemoteEmbeddingSpec], num_servers: int) -> None:
        self.num_bytes = [0] * num_servers
        self.ids = [0.0] * num_servers
        self._servers = range(num_servers)
        self._bytes = {spec.name: spec.num_embeddings * row_bytes(spec) for spec in specs}
        self._all_bytes = max(1, sum(self._bytes.values()))
        known = any(spec.pooling_factor is not None for spec in specs)
        self._reads = {
            spec.name: (spec.pooling_factor or 1.0) * spec.embedding_dim if known else 0.0
            for spec in specs
        }
        self._all_reads = sum(self._reads.values()) or 1.0
        self._load = [0.0] * num_servers

    def share(self, spec: RemoteEmbeddingSpec) -> float:
        """A table's part of all bytes plus its part of all values read."""
        reads = self._reads[spec.name] / self._all_reads
        return self._bytes[spec.name] / self._all_bytes + reads

    def is_spread(self, spec: RemoteEmbeddingSpec) -> bool:
        """Whether a table goes to several servers."""
        if spec.sharding is not None:
            return spec.sharding != "table_wise"
        return bool(self._too_much(spec))

    def _too_much(self, spec: RemoteEmbeddingSpec) -> str:
        """Of what a table alone is more than one server's fair share; empty if of nothing."""
        fair = 1 / len(self._servers)
        for what, part in (
            ("bytes", self._bytes[spec.name] / self._all_bytes),
            ("values read", self._reads[spec.name] / self._all_reads),
        ):
            if fair < 1 and part > fair:
                return f"{part:.0%} of all {what}, above a server's fair {fair:.0%}"
        return ""

    def spread(self, spec: RemoteEmbeddingSpec) -> _Parts:
        """Cut a table over the servers, row-wise or column-wise."""
        sharding, why = spec.sharding, "pinned by its spec"
        if sharding is None:
            sharding, cheaper = self._cheaper_cut(spec)
            why = f"spread: {self._too_much(spec)}; {cheaper}"
        if sharding == "column_wise":
            obstacle = _why_not_by_columns(spec)
            if obstacle:
                raise SpecError(
                    f"Table '{spec.name}' cannot be sharded column-wise: {obstacle}. Shard it "
                    "row-wise."
                )
            return self._take(spec, sharding, _columns(spec, self._servers), why)
        return self._take(spec, "row_wise", _rows(spec, self._servers), why)

    def keep_whole(self, spec: RemoteEmbeddingSpec) -> _Parts:
        """Put a table on the server that has least so far."""
        server = min(self._servers, key=self._load.__getitem__)
        why = "the only server" if len(self._servers) == 1 else f"ps{server} had least so far"
        why = f"whole, {'pinned by its spec' if spec.sharding else 'within a fair share'}; {why}"
        part = _Part(server, 0, 1, spec.num_embeddings, 0, spec.embedding_dim)
        return self._take(spec, "table_wise", [part], why)

    def _cheaper_cut(self, spec: RemoteEmbeddingSpec) -> tuple[Sharding, str]:
        """The cut that sends fewer bytes a sample, ids out, rows and their gradients back; why."""
        servers, ids = len(self._servers), spec.pooling_factor or 1.0
        row = 2 * _FLOAT32_BYTES * spec.embedding_dim
        pooled = spec.mode in ("sum", "mean")
        by_rows = ids * _ID_BYTES + (min(servers, ids) if pooled else ids) * row
        by_columns = servers * ids * _ID_BYTES + (1 if pooled else ids) * row
        sizes = f"{by_rows:,.0f} bytes a sample by rows, {by_columns:,.0f} by columns"
        if by_columns >= by_rows:
            return "row_wise", sizes
        obstacle = _why_not_by_columns(spec)
        if spec.embedding_dim < servers * _LEAST_COLUMNS:
            obstacle = f"{spec.embedding_dim} columns are too few for {servers} servers"
        if obstacle:
            return "row_wise", f"{sizes}, but {obstacle}"
        return "column_wise", sizes

    def _take(
        self, spec: RemoteEmbeddingSpec, sharding: Sharding, parts: list[_Part], why: str
    ) -> _Parts:
        for part in parts:
            size = part.num_rows * row_bytes(spec, part.num_columns)
            self.num_bytes[part.server] += size
            self.ids[part.server] += (spec.pooling_factor or 1.0) / part.num_row_shards
            reads = self._reads[spec.name] / len(parts) / self._all_reads
            self._load[part.server] += size / self._all_bytes + reads
        return sharding, parts, why


def row_bytes(spec: RemoteEmbeddingSpec, num_columns: int | None = None) -> int:
    """Bytes of one row of a table, optimizer state included; of some of its columns if given."""
    columns = spec.embedding_dim if num_columns is None else num_columns
    assert isinstance(spec.optimizer, SparseOptimizerSettings)
    return _row_bytes(spec.dtype, spec.optimizer, columns)


def _row_bytes(dtype: torch.dtype, settings: SparseOptimizerSettings, num_columns: int) -> int:
    state = sum(settings.state_widths(num_columns).values())
    return num_columns * dtype.itemsize + state * _FLOAT32_BYTES


def _why_not_by_columns(spec: RemoteEmbeddingSpec) -> str:
    if isinstance(spec.optimizer, SparseOptimizerSettings) and spec.optimizer.row_wise:
        return f"{spec.optimizer!r} looks at a row's columns together"
    if spec.max_norm is not None:
        return "max_norm looks at a row's columns together"
    return ""


def _rows(spec: RemoteEmbeddingSpec, servers: range) -> list[_Part]:
    count = min(len(servers), spec.num_embeddings)
    return [
        _Part(k, k, count, len(range(k, spec.num_embeddings, count)), 0, spec.embedding_dim)
        for k in range(count)
    ]


def _columns(spec: RemoteEmbeddingSpec, servers: range) -> list[_Part]:
    count = min(len(servers), spec.embedding_dim)
    cuts = [spec.embedding_dim * k // count for k in range(count + 1)]
    return [
        _Part(k, 0, 1, spec.num_embeddings, cuts[k], cuts[k + 1] - cuts[k]) for k in range(count)
    ]


def _lay_out(
    specs: Sequence[RemoteEmbeddingSpec],
    parts: dict[str, _Parts],
    planner: _Planner,
    modules: dict[str, int],
) -> Plan:
    """Give every shard its slab and its first row there, in the order of the specs."""
    slabs: list[dict[SlabKind, list[SlabPart]]] = [{} for _ in planner.num_bytes]
    placements = {}
    for spec in specs:
        sharding, cut, why = parts[spec.name]
        shards = []
        for part in cut:
            kind = _kind(spec, part.num_columns)
            members = slabs[part.server].setdefault(kind, [])
            first_row = members[-1].first_row + members[-1].num_rows if members else 0
            members.append(
                SlabPart(
                    spec.name, part.row_shard, part.num_row_shards, part.first_column,
                    first_row, part.num_rows,
                )
            )  # fmt: skip
            slab = list(slabs[part.server]).index(kind)
            shards.append(
                Shard(
                    part.server, slab, first_row, part.num_rows,
                    part.first_column, part.num_columns,
                )
            )  # fmt: skip
        placements[spec.name] = Placement(spec.name, sharding, tuple(shards), why)
    layouts = tuple(
        tuple(SlabLayout(kind, tuple(members)) for kind, members in by_kind.items())
        for by_kind in slabs
    )
    return Plan(placements, layouts, tuple(planner.num_bytes), tuple(planner.ids), modules)


def _kind(spec: RemoteEmbeddingSpec, num_columns: int) -> SlabKind:
    settings = spec.optimizer
    assert isinstance(settings, SparseOptimizerSettings)
    alone = spec.name if settings.clip_norm is not None else ""  # its norm is its table's own
    return SlabKind(num_columns, spec.dtype, settings, spec.max_norm, spec.norm_type, alone)
