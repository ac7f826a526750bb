"""Writing whole rows of a table on its servers, in pieces.

Shapes: U rows to write, D columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridpar.errors import InputError, SpecError
from hybridpar.features import check
from hybridpar.sharding import Shard
from hybridpar.specs import RemoteEmbeddingSpec
from hybridpar.trainer.tables import RemoteTables, plain_rows
from hybridpar.transport import Reply

_WRITE_BYTES = 16 << 20  # rows are written in pieces of about this size


def write_rows(
    tables: RemoteTables, table: str, ids: Tensor, values: Tensor, *, reset_state: bool
) -> None:
    """Write logical rows of a table, piece by piece.

    Args:
        tables: the model's tables.
        table: which of them.
        ids: (U,) int32 or int64 logical rows, all different.
        values: (U, D), of any floating dtype and device.
        reset_state: whether the optimizer forgets what it knows of the rows.

    Raises:
        InputError: if an id is out of range or comes twice, or the values do not fit.
        SpecError: if no table has the name.
    """
    spec = tables.spec(table)
    if spec.module is not None:
        raise SpecError(f"'{table}' is a module, not a table. Use model.load_plain.")
    where = f"set_rows of table '{table}' on {tables.ctx.name}"
    if not isinstance(ids, Tensor) or ids.dim() != 1:
        shape = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"{where} got ids {shape}. Give a 1-D tensor of int64.")
    rows = check("ids", plain_rows(spec), ids, where).bags.indices
    _check_different(where, rows)
    _check_values(where, spec, rows, values)
    piece = max(1, _WRITE_BYTES // (spec.embedding_dim * spec.dtype.itemsize))
    for start in range(0, rows.numel(), piece):
        some = rows[start : start + piece]
        _write_piece(tables, spec, some, values[start : start + piece], reset_state)


def _check_different(where: str, rows: Tensor) -> None:
    ordered = rows.sort().values
    twice = (ordered[1:] == ordered[:-1]).nonzero()
    if twice.numel():
        raise InputError(
            f"{where} got id {int(ordered[int(twice[0])])} more than once. Give every id once."
        )


def _check_values(where: str, spec: RemoteEmbeddingSpec, rows: Tensor, values: object) -> None:
    wanted = rows.numel(), spec.embedding_dim
    if not isinstance(values, Tensor) or tuple(values.shape) != wanted:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(
            f"{where} got values {got} for {rows.numel()} ids. Give a tensor of shape {wanted}: a "
            "row for each id, as wide as embedding_dim."
        )
    if not values.is_floating_point():
        raise InputError(f"{where} got values of dtype {values.dtype}. Give floats: values.float()")


def _write_piece(
    tables: RemoteTables, spec: RemoteEmbeddingSpec, ids: Tensor, values: Tensor, reset: bool
) -> None:
    """Write some rows, and wait until every server has."""
    values = values.detach().to("cpu", spec.dtype)
    if spec.padding_idx is not None:  # stays zero, whatever was given
        values = values.masked_fill((ids == spec.padding_idx).unsqueeze(1), 0.0)
    placement = tables.plan.placements[spec.name]
    replies: list[Reply] = []

    def send(shard: Shard, rows: Tensor, part: Tensor) -> None:
        server = tables.servers[shard.server]
        at = rows + shard.first_row
        call = "set_rows", tables.model_id, shard.slab, at, part.contiguous(), reset
        replies.append(server.send(*call))

    count = placement.num_row_shards
    for index, shard in enumerate(placement.shards):
        if placement.sharding == "column_wise":
            columns = slice(shard.first_column, shard.first_column + shard.num_columns)
            send(shard, ids, values[:, columns])
        elif count == 1:
            send(shard, ids, values)
        else:
            mine = (ids.remainder(count) == index).nonzero().squeeze(1)
            rows = ids[mine].div(count, rounding_mode="floor")
            if len(mine):
                send(shard, rows, torch.index_select(values, 0, mine))
    for reply in replies:
        reply.wait()


def write_range(
    tables: RemoteTables, table: str, values: Tensor, part: int, num_parts: int
) -> None:
    """Write one of several equal parts of a whole table, whose optimizer state begins anew.

    Args:
        tables: the model's tables.
        table: which of them.
        values: (num_embeddings, D).
        part: which part, from 0.
        num_parts: how many there are.
    """
    start, stop = (len(values) * edge // num_parts for edge in (part, part + 1))
    write_rows(tables, table, torch.arange(start, stop), values[start:stop], reset_state=True)
