"""One file of a checkpoint: raw rows, or what torch loads with ``weights_only=True``; checksums."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridpar.errors import CheckpointError
from hybridpar.shared_memory import bytes_of

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file: its name in the checkpoint's folder, its size, and the CRC-32 of its bytes."""

    name: str
    num_bytes: int
    crc32: int


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
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    with (folder / name).open("wb") as file:  # by hand: torch hides what the system says
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(name, len(data), zlib.crc32(data))


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
