"""`SavedRows`: the rows of a checkpoint, read as a table is cut now, however it was cut then."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hybridpar.checkpoint.files import check, map_rows
from hybridpar.checkpoint.manifest import ROWS, Manifest, ShardEntry
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
        base = self.manifest.base
        self._base = SavedRows(folder.parent / base) if base else None

    def read(self, table: str, what: str, part: SlabPart, into: Tensor) -> None:
        """Fill a shard of today with the rows that it had; rows that are new stay as they are.

        Args:
            table: the table in the checkpoint.
            what: ``"weight"``, or an optimizer state.
            part: which of the table's rows and columns these are.
            into: (part.num_rows, columns), filled in place.
        """
        if self._base is not None:
            self._base.read(table, what, part, into)
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
        source = self._rows(shard, what)
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
        mine = (logical.remainder(shard.num_row_shards) == shard.row_shard).nonzero().squeeze(1)
        rows = logical[mine].div(shard.num_row_shards, rounding_mode="floor")
        if ROWS in shard.files:
            there = self._some_rows(shard)
            place = torch.searchsorted(there, rows).clamp_(max=max(0, len(there) - 1))
            has = there[place] == rows if len(there) else torch.zeros_like(rows, dtype=torch.bool)
            mine, rows = mine[has], place[has]
        into[mine, ours] = source[rows, theirs]

    def _rows(self, shard: ShardEntry, what: str) -> Tensor:
        """A shard's rows as they are in its file: all of them, or those of `_some_rows`."""
        saved = self.manifest.tables[shard.table]
        width, dtype = shard.num_columns, torch.float32
        if what == WEIGHT:
            dtype = getattr(torch, saved.dtype)
        elif saved.widths.get(what) == 1:
            width = 1
        mapped = self._map(shard, what, width, dtype)
        if ROWS not in shard.files:
            return mapped[shard.first_row : shard.first_row + shard.num_rows]
        start, stop = self._span(shard)
        return mapped[start:stop]

    def _some_rows(self, shard: ShardEntry) -> Tensor:
        """The rows of a shard that its files hold, in order, counted from its first."""
        start, stop = self._span(shard)
        return self._map(shard, ROWS, 1, torch.int64)[start:stop, 0] - shard.first_row

    def _span(self, shard: ShardEntry) -> tuple[int, int]:
        """Where in its files a shard's rows are, if those hold only some."""
        rows = self._map(shard, ROWS, 1, torch.int64)[:, 0].contiguous()
        ends = torch.tensor([shard.first_row, shard.first_row + shard.num_rows])
        start, stop = torch.searchsorted(rows, ends).tolist()
        return start, stop

    def _map(self, shard: ShardEntry, what: str, width: int, dtype: torch.dtype) -> Tensor:
        entry = shard.files.get(what)
        if entry is None:
            raise CheckpointError(f"{self._folder} has no {what} of table '{shard.table}'.")
        mapped = self._mapped.get(entry.name)
        if mapped is None:
            check(self._folder, entry)
            mapped = self._mapped[entry.name] = map_rows(self._folder, entry, width, dtype)
        return mapped
