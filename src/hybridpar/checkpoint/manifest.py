"""The files of a checkpoint: raw rows, and a manifest that a person can read.

    DIR/step-000000001200/
        manifest.json        what is in it: tables, shards, files, checksums, step, versions
        ps0.slab0.weight     rows of one server, raw, one after another
        ps0.slab0.sum        their optimizer state
        model.pt             the dense half, its optimizer, schedulers and so on
        trainer0.pt          where a trainer's random generators and data were

A checkpoint is written into a folder of another name, which one rename makes current: whatever
happens while it is written, those that were there stay whole. Nothing in it is ever unpickled as
code: ``.pt`` files are loaded with ``weights_only=True``, all others are bytes or JSON.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybridpar.checkpoint.files import FileEntry
from hybridpar.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
ROWS = "rows"  # beside weight and states, where only some rows are written: which ones


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard of a table: the logical rows ``row_shard, row_shard + num_row_shards, …``.

    Attributes:
        table: the table's name.
        row_shard: see above.
        num_row_shards: see above.
        first_column: the first of the table's columns in it.
        num_columns: how many of them.
        num_rows: how many rows it has.
        first_row: the row of the files at which it begins.
        files: by ``"weight"`` and the names of the optimizer's states, the file that they are in.
            Other shards may be in the same. With ``"rows"`` the files hold only some of the rows:
            those whose numbers, counted as ``first_row`` is, are in that file, int64.
    """

    table: str
    row_shard: int
    num_row_shards: int
    first_column: int
    num_columns: int
    num_rows: int
    first_row: int
    files: dict[str, FileEntry]


@dataclass(frozen=True, slots=True)
class TableEntry:
    """One table.

    Attributes:
        num_embeddings: its rows.
        embedding_dim: its columns.
        dtype: of its rows, such as ``"float32"``.
        optimizer: the class of its optimizer's settings.
        widths: for each optimizer state, float32 values a row.
    """

    num_embeddings: int
    embedding_dim: int
    dtype: str
    optimizer: str
    widths: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps that had been done.
        epoch: passes over the data that had been done.
        batches: batches of the next pass that each trainer had used.
        num_trainers: how many trainers there were.
        num_servers: how many servers.
        optimizer_steps: steps that the servers' optimizers had done.
        tables: the tables, by name.
        shards: their shards, in any order.
        modules: for each hosted module, its file.
        files: the other files.
        base: the name of the checkpoint beside it that it completes: it holds only the rows that
            changed since; empty if it is whole by itself.
        versions: of hybridpar and torch.
        format: of this file.
    """

    step: int
    epoch: int
    batches: int
    num_trainers: int
    num_servers: int
    optimizer_steps: int
    tables: dict[str, TableEntry]
    shards: list[ShardEntry]
    modules: dict[str, FileEntry]
    files: list[FileEntry]
    base: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def all_files(self) -> list[FileEntry]:
        """Every file of the checkpoint but the manifest."""
        rows = {entry.name: entry for shard in self.shards for entry in shard.files.values()}
        return [*rows.values(), *self.modules.values(), *self.files]

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint's folder."""
        path = folder / MANIFEST
        with path.open("w") as file:
            json.dump(asdict(self), file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint.

        Raises:
            CheckpointError: if there is none, or it cannot be read.
        """
        path = folder / MANIFEST
        try:
            raw: dict[str, Any] = json.loads(path.read_text())
            if raw["format"] != FORMAT:
                raise CheckpointError(
                    f"{path} is of format {raw['format']}, and this version of hybridpar reads "
                    f"{FORMAT}. It was written by hybridpar {raw['versions'].get('hybridpar')}."
                )
            raw["tables"] = {name: TableEntry(**entry) for name, entry in raw["tables"].items()}
            raw["shards"] = [_shard(entry) for entry in raw["shards"]]
            raw["modules"] = {name: FileEntry(**entry) for name, entry in raw["modules"].items()}
            raw["files"] = [FileEntry(**entry) for entry in raw["files"]]
            return cls(**raw)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error


def _shard(raw: dict[str, Any]) -> ShardEntry:
    return ShardEntry(
        **raw | {"files": {what: FileEntry(**entry) for what, entry in raw["files"].items()}}
    )
