"""What callbacks are told of the servers: the plan, and what each has exchanged."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlannedShard:
    """A part of a table, and the server that holds it."""

    server: str
    num_rows: int
    first_column: int
    num_columns: int


@dataclass(frozen=True, kw_only=True)
class PlannedTable:
    """A table and where it is.

    Attributes:
        name: the table.
        num_embeddings: its rows.
        embedding_dim: its columns.
        dtype: what it is stored as, such as ``"float32"``.
        optimizer: its optimizer's settings, as text.
        sharding: ``"table_wise"``, ``"row_wise"`` or ``"column_wise"``.
        num_bytes: of weights and optimizer state, all shards together.
        shards: its parts.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: str
    optimizer: str
    sharding: str
    num_bytes: int
    shards: tuple[PlannedShard, ...]


@dataclass(frozen=True, kw_only=True)
class PlannedServer:
    """A server as the plan has it.

    Attributes:
        name: such as ``"ps0"``.
        num_bytes: of the tables' weights and optimizer state on it.
        ids_a_sample: ids that it is asked for in a sample, as far as the specs tell.
        modules: the hosted modules on it.
    """

    name: str
    num_bytes: int
    ids_a_sample: float
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ServerTraffic:
    """What this trainer and one server have exchanged since the fit began.

    Attributes:
        server: such as ``"ps0"``.
        rows: rows looked up for steps, each as often as a batch names it.
        id_bytes: of those ids, and of the bags' offsets.
        row_bytes: of the rows that came, pooled where the server pools.
        gradient_bytes: of the gradients that went.
        sent_bytes: that crossed the socket to the server. Of what is in shared memory only the
            reference does.
        received_bytes: that crossed the socket from it.
        waited_s: seconds in which this trainer waited for its answers.
    """

    server: str
    rows: int = 0
    id_bytes: int = 0
    row_bytes: int = 0
    gradient_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    waited_s: float = 0.0
