"""``hybridpar checkpoint``: show what a checkpoint holds, or check it."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from hybridpar.checkpoint import files, folders
from hybridpar.checkpoint.manifest import Manifest
from hybridpar.cli.arguments import Commands


def add_to(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "checkpoint",
        help="show what a checkpoint holds, or check it",
        description="Show what a checkpoint holds, or compare its files with their checksums. "
        "Given a directory with several, the newest is taken.",
        epilog="example: hybridpar checkpoint verify runs/checkpoints",
    )
    parser.add_argument("action", choices=["show", "verify"])
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.set_defaults(command=_checkpoint)


def _checkpoint(arguments: argparse.Namespace) -> int:
    folder = folders.newest(arguments.directory)
    if arguments.action == "verify":
        _verify(folder)
    else:
        _show(folder)
    return 0


def _verify(folder: Path) -> None:
    for path in folders.chain(folder):
        entries = Manifest.read(path).all_files()
        for entry in entries:
            files.check(path, entry)
        print(f"{path}: all {len(entries)} files are whole")


def _show(folder: Path) -> None:
    manifest = Manifest.read(folder)
    print(folder)
    if manifest.base:
        print(f"holds the rows that changed since {manifest.base}")
    print(f"step {manifest.step}, epoch {manifest.epoch}, batch {manifest.batches}")
    print(f"written by {manifest.num_trainers} trainers and {manifest.num_servers} servers")
    for name, table in manifest.tables.items():
        width = table.embedding_dim * getattr(torch, table.dtype).itemsize
        width += 4 * sum(table.widths.values())
        print(
            f"table {name}: {table.num_embeddings:,} rows of {table.embedding_dim} {table.dtype}, "
            f"{table.optimizer}, {table.num_embeddings * width:,} bytes"
        )
    for name, entry in manifest.modules.items():
        print(f"module {name}: {entry.num_bytes:,} bytes")
    total = sum(entry.num_bytes for entry in manifest.all_files())
    print(f"{len(manifest.all_files())} files, {total:,} bytes")
