"""The folders of a directory of checkpoints: begun, made current by one rename, removed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from hybridpar.checkpoint.manifest import MANIFEST, Manifest
from hybridpar.errors import CheckpointError

_PREFIX, _UNFINISHED = "step-", ".unfinished-"


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


def unfinished(directory: Path, step: int) -> Path:
    """Where a step's checkpoint is written until it is current."""
    return directory / f"{_UNFINISHED}{step}"


def begin(directory: Path, step: int) -> Path:
    """Make the folder that the checkpoint of a step is written into."""
    folder = unfinished(directory, step)
    for left in directory.glob(f"{_UNFINISHED}*"):  # by attempts that were cut short
        shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def publish(folder: Path, step: int, keep: int) -> Path:
    """Make a written checkpoint current, and remove all but the newest ones."""
    final = folder.parent / name_of(step)
    _sync(folder)
    if final.exists():  # the same step once more, after a restart
        _remove(final)
    folder.rename(final)
    _sync(folder.parent)
    found = checkpoints(folder.parent)
    needed = {path.name for kept in found[-keep:] for path in chain(kept)}
    for old in found:
        if old.name not in needed:
            _remove(old)
    return final


def keep_only(directory: Path, names: Collection[str]) -> None:
    """Remove all checkpoints of a directory but some, each of which is whole by itself."""
    for old in checkpoints(directory):
        if old.name not in names:
            _remove(old)


def _remove(folder: Path) -> None:
    """Remove a checkpoint: by one rename, so that it is never seen with some of its files gone."""
    gone = folder.parent / f"{_UNFINISHED}removed-{folder.name}"
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


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
