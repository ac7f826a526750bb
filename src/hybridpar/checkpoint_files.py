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
import shutil
import zlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridpar.errors import CheckpointError
from hybridpar.shared_memory import bytes_of

FORMAT = 1
MANIFEST = "manifest.json"
ROWS = "rows"  # beside weight and states, where only some rows are written: which ones
_PREFIX, _UNFINISHED = "step-", ".unfinished-"
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file: its name in the checkpoint's folder, its size, and the CRC-32 of its bytes."""

    name: str
    num_bytes: int
    crc32: int


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


def checkpoints(directory: Path) -> list[Path]:
    """The whole checkpoints in a directory, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.glob(f"{_PREFIX}*") if (path / MANIFEST).is_file())


def newest(directory: Path) -> Path:
    """A checkpoint's folder itself, or the newest one in a directory.

    Raises:
        CheckpointError: if there is none.
    """
    if (directory / MANIFEST).is_file():
        return directory
    found = checkpoints(directory)
    if not found:
        raise CheckpointError(f"There is no checkpoint in {directory}.")
    return found[-1]


def name_of(step: int) -> str:
    """The name of a step's checkpoint in its directory."""
    return f"{_PREFIX}{step:012d}"


def begin(directory: Path, step: int) -> Path:
    """Make the folder that the checkpoint of a step is written into."""
    folder = directory / f"{_UNFINISHED}{step}"
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was cut short
    folder.mkdir(parents=True)
    return folder


def publish(folder: Path, step: int, keep: int) -> Path:
    """Make a written checkpoint current, and remove all but the newest ones."""
    final = folder.parent / name_of(step)
    _sync(folder)
    if final.exists():  # the same step once more, after a restart
        old = folder.parent / f"{_UNFINISHED}replaced-{step}"
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        folder.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        folder.rename(final)
    _sync(folder.parent)
    found = checkpoints(folder.parent)
    needed = {path.name for kept in found[-keep:] for path in chain(kept)}
    for old in found:
        if old.name not in needed:
            shutil.rmtree(old, ignore_errors=True)
    return final


def chain(folder: Path) -> list[Path]:
    """A checkpoint and those that it completes, the whole one first.

    Raises:
        CheckpointError: if one of them is missing.
    """
    found = [folder]
    while base := Manifest.read(found[0]).base:
        found.insert(0, folder.parent / base)
    return found


def _sync(folder: Path) -> None:
    """Have the system write a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_rows(
    folder: Path, names: Mapping[str, str], chunks: Iterable[Mapping[str, Tensor]]
) -> dict[str, FileEntry]:
    """Write rows into several files at once.

    Args:
        folder: where.
        names: the files' names, by what is in them.
        chunks: by what it is, some (rows, width) more for each file.
    """
    sizes, sums = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    with ExitStack() as stack:
        files = {
            what: stack.enter_context((folder / name).open("wb", buffering=0))
            for what, name in names.items()
        }
        for chunk in chunks:
            for what, rows in chunk.items():
                data = bytes_of(rows)
                sums[what] = zlib.crc32(data, sums[what])
                sizes[what] += len(data)
                while len(data):
                    data = data[files[what].write(data) :]
        for file in files.values():
            os.fsync(file.fileno())
    return {what: FileEntry(name, sizes[what], sums[what]) for what, name in names.items()}


def write_state(folder: Path, name: str, state: object) -> FileEntry:
    """Write what torch can load with ``weights_only=True``."""
    path = folder / name
    torch.save(state, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return entry_of(path)


def read_state(folder: Path, entry: FileEntry) -> Any:
    """What `write_state` wrote, checked.

    Raises:
        CheckpointError: if the file is damaged, or holds more than plain values and tensors.
    """
    check(folder, entry)
    try:
        return torch.load(folder / entry.name, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(f"{folder / entry.name} cannot be loaded: {error}") from error


def map_rows(folder: Path, entry: FileEntry, width: int, dtype: torch.dtype) -> Tensor:
    """The (rows, width) of a file, as memory that is read from it when touched."""
    size = entry.num_bytes // dtype.itemsize
    if size == 0:
        return torch.empty(0, width, dtype=dtype)
    return torch.from_file(str(folder / entry.name), False, size, dtype=dtype).view(-1, width)


def check(folder: Path, entry: FileEntry) -> None:
    """Compare a file with its checksum.

    Raises:
        CheckpointError: naming the file, if it is missing or damaged.
    """
    path = folder / entry.name
    try:
        found = entry_of(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if found.num_bytes != entry.num_bytes:
        raise CheckpointError(
            f"{path} is damaged: it has {found.num_bytes} bytes, and had {entry.num_bytes}."
        )
    if found.crc32 != entry.crc32:
        raise CheckpointError(f"{path} is damaged: its checksum is not what was written.")


def entry_of(path: Path) -> FileEntry:
    """A file as it is now."""
    size = crc = 0
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            crc = zlib.crc32(data, crc)
            size += len(data)
    return FileEntry(path.name, size, crc)
