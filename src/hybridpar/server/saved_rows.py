"""`SavedRows`: the rows of a checkpoint, read as a table is cut now, however it was cut then."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hybridpar.checkpoint_files import Manifest, ShardEntry, check, map_rows
from hybridpar.errors import CheckpointError
from hybridpar.messages import WEIGHT
from hybridpar.sharding import SlabPart

_CHUNK_BYTES = 8 << 20


class SavedRows:
    """Reads rows out of one checkpoint, file by file, each checked before it is used.

    Args:
        folder: the checkpoint's own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.manifest = Manifest.read(folder)
        self._mapped: dict[str, Tensor] = {}

    def read(self, table: str, what: str, part: SlabPart, into: Tensor) -> None:
        """Fill a shard of today with the rows that it had; rows that are new stay as they are.

        Args:
            table: the table in the checkpoint.
            what: ``"weight"``, or an optimizer state.
            part: which of the table's rows and columns these are.
            into: (part.num_rows, columns), filled in place.
        """
        old_rows = self.manifest.tables[table].num_embeddings
        shards = [shard for shard in self.manifest.shards if shard.table == table]
        size = max(1, _CHUNK_BYTES // max(1, into.shape[1] * into.element_size()))
        for start in range(0, part.num_rows, size):
            local = torch.arange(start, min(start + size, part.num_rows))
            logical = local * part.num_row_shards + part.row_shard
            logical = logical[logical < old_rows]
            target = into[start : start + len(logical)]  # new rows are the last ones
            for shard in shards:
                self._copy(shard, what, logical, part.first_column, target)

    def _copy(
        self, shard: ShardEntry, what: str, logical: Tensor, first_column: int, into: Tensor
    ) -> None:
        """Copy those of some logical rows, and those of some columns, that a shard has."""
        source = self._rows(shard, what, into.dtype)
        by_row = source.shape[1] == 1 and shard.num_columns > 1  # a state of one value a row
        left = 0 if by_row else max(first_column, shard.first_column)
        right = (
            1
            if by_row
            else min(first_column + into.shape[1], shard.first_column + shard.num_columns)
        )
        if left >= right:
            return
        if by_row:
            theirs = ours = slice(0, 1)
        else:
            theirs = slice(left - shard.first_column, right - shard.first_column)
            ours = slice(left - first_column, right - first_column)
        if shard.num_row_shards == 1:
            into[:, ours] = source[logical, theirs]
            return
        mine = (logical.remainder(shard.num_row_shards) == shard.row_shard).nonzero().squeeze(1)
        rows = logical[mine].div(shard.num_row_shards, rounding_mode="floor")
        into[mine, ours] = source[rows, theirs]

    def _rows(self, shard: ShardEntry, what: str, dtype: torch.dtype) -> Tensor:
        """A shard's rows as they are in its file, in the dtype that they were saved in."""
        entry = shard.files.get(what)
        if entry is None:
            raise CheckpointError(f"{self._folder} has no {what} of table '{shard.table}'.")
        saved = self.manifest.tables[shard.table]
        width = shard.num_columns
        if what == WEIGHT:
            dtype = getattr(torch, saved.dtype)
        else:
            dtype = torch.float32
            width = 1 if saved.widths[what] == 1 else width
        mapped = self._mapped.get(entry.name)
        if mapped is None:
            check(self._folder, entry)
            mapped = self._mapped[entry.name] = map_rows(self._folder, entry, width, dtype)
        return mapped[shard.first_row : shard.first_row + shard.num_rows]
