"""`Saver`: writes and reads the checkpoints of one model, together with the other trainers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridpar.checkpoint import files, folders
from hybridpar.checkpoint.manifest import Manifest, TableEntry
from hybridpar.errors import CheckpointError, PeerLostError
from hybridpar.optim import SparseOptimizerSettings
from hybridpar.trainer.checkpointing.checkpoint import Checkpoint, Position
from hybridpar.trainer.checkpointing.random_states import random_states
from hybridpar.trainer.tables import RemoteTables

_POLL_S = 0.5  # how often to ask the servers whether they have written


class Saver:
    """Writes and reads the checkpoints of one model on one trainer. Every trainer calls alike.

    Args:
        tables: the model's tables.
        holders: by name, what has a ``state_dict``: the dense half, optimizers, schedulers.
        on_current: called on trainer 0 when a checkpoint has become current, with its folder, its
            step, the bytes of its own files, and the seconds since it was begun.
    """

    def __init__(
        self,
        tables: RemoteTables,
        holders: Mapping[str, Any],
        on_current: Callable[[Path, int, int, float], None] = lambda *_: None,
    ) -> None:
        self._tables = tables
        self._ctx = tables.ctx
        self._holders = holders
        self._on_current = on_current
        self._began = 0.0
        self._pending: tuple[Path, Position, int, str] | None = None
        self._newest = Path()  # the checkpoint that this saver made current last
        self._since_full = 0  # checkpoints since one that holds all rows
        self._polled = 0.0

    def save(self, settings: Checkpoint, position: Position) -> None:
        """Save between two steps.

        Raises:
            CheckpointError: if a trainer or a server cannot write. What was there stays.
        """
        self.finish()
        self._began = time.monotonic()
        directory = Path(settings.directory).absolute()
        folder = folders.unfinished(directory, position.step)
        self._agree(lambda: folders.begin(directory, position.step) if self._leads else None)
        every_full = settings.every_full or 1
        follows = self._newest.parent == directory and 0 < self._since_full < every_full
        base = self._newest.name if follows else ""
        self._since_full = self._since_full + 1 if base else 1
        track = every_full > 1
        self._agree(lambda: self._write(folder, position, touched_only=bool(base), track=track))
        self._pending = folder, position, settings.keep, base
        if settings.wait:
            self._agree(self.finish)

    def poll(self) -> None:
        """Make the checkpoint under way current if it is written by now."""
        if self._pending is None or not self._leads or time.monotonic() - self._polled < _POLL_S:
            return
        self._polled = time.monotonic()
        servers = self._tables.servers.values()
        if all(server.call("has_saved", self._tables.model_id) for server in servers):
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint under way is written, and make it current."""
        if self._pending is None:
            return
        (folder, position, keep, base), self._pending = self._pending, None
        self._newest = folder.parent / folders.name_of(position.step)
        if not self._leads:
            return
        replies = [
            server.send("finish_save", self._tables.model_id)
            for server in self._tables.servers.values()
        ]
        written = [reply.wait(patiently=True) for reply in replies]
        manifest = Manifest(
            step=position.step,
            epoch=position.epoch,
            batches=position.batches,
            num_trainers=self._ctx.num_trainers,
            num_servers=self._ctx.num_servers,
            optimizer_steps=max((steps for _, steps in written), default=0),
            tables=self._entries(),
            shards=[shard for server, _ in written for shard in server.shards],
            modules={n: entry for server, _ in written for n, entry in server.modules.items()},
            files=[files.entry_of(path) for path in sorted(folder.glob("*.pt"))
                   if path.name == "model.pt" or path.name.startswith("trainer")],
            base=base,
            versions={"hybridpar": _version(), "torch": torch.__version__},
        )  # fmt: skip
        manifest.write(folder)
        current = folders.publish(folder, position.step, keep)
        num_bytes = sum(entry.num_bytes for entry in manifest.all_files())
        self._on_current(current, position.step, num_bytes, time.monotonic() - self._began)

    def load(
        self, folder: Path, tables: Mapping[str, str] | None, *, dense: bool, state: bool
    ) -> tuple[Position, Any]:
        """Take the model from a checkpoint.

        Args:
            folder: the checkpoint's own.
            tables: for each table or module, the one in the checkpoint that it is taken from; None
                takes all, and all of the checkpoint's must be there.
            dense: whether to take the dense half, optimizers, schedulers and so on.
            state: whether to take the state of the tables' optimizers.

        Returns:
            How far training had come, and what this trainer wrote of itself, for :meth:`rewind`;
            None if the number of trainers is another now.

        Raises:
            CheckpointError: if it is damaged, or does not fit; lists all differences.
        """
        manifest = Manifest.read(folder)
        wanted = {name: name for name in self._tables.specs} if tables is None else dict(tables)
        differences = self._differences(manifest, wanted, everything=tables is None, state=state)
        self._since_full = 0  # the servers do not know what changes by this
        if differences:
            raise CheckpointError(
                f"{folder} does not fit the model:\n  " + "\n  ".join(differences)
            )
        self._agree(lambda: self._load_tables(folder, manifest, wanted, state=state))
        entries = {entry.name: entry for entry in manifest.files}
        if dense:
            saved = files.read_state(folder, entries["model.pt"])
            for name, holder in self._holders.items():
                if name in saved:
                    holder.load_state_dict(saved[name])
            self._ctx.step = manifest.step
        own = None
        if manifest.num_trainers == self._ctx.num_trainers:
            own = files.read_state(folder, entries[f"trainer{self._ctx.rank}.pt"])
        data = None if own is None else own["data"]
        return Position(manifest.step, manifest.epoch, manifest.batches, data), own

    @property
    def _leads(self) -> bool:
        return self._ctx.rank == 0

    def _write(self, folder: Path, position: Position, *, touched_only: bool, track: bool) -> None:
        own = {"random": random_states(), "data": position.data}
        files.write_state(folder, f"trainer{self._ctx.rank}.pt", own)
        if self._leads:
            replies = [
                server.send("begin_save", self._tables.model_id, str(folder), touched_only, track)
                for server in self._tables.servers.values()
            ]
            state = {name: holder.state_dict() for name, holder in self._holders.items()}
            files.write_state(folder, "model.pt", state)
            for reply in replies:
                reply.wait()

    def _load_tables(
        self, folder: Path, manifest: Manifest, wanted: dict[str, str], *, state: bool
    ) -> None:
        if self._leads:
            steps = manifest.optimizer_steps if state else None
            replies = [
                server.send("load", self._tables.model_id, str(folder), wanted, steps)
                for server in self._tables.servers.values()
            ]
            for reply in replies:
                reply.wait(patiently=True)

    def _agree(self, action: Callable[[], object]) -> None:
        """Do something on every trainer; if one of them cannot, all fail, it with its own error."""
        error: Exception | None = None
        try:
            action()
        except Exception as own:  # noqa: BLE001 - raised below, once the others know
            error = own
        failed = torch.zeros(self._ctx.num_trainers)
        failed[self._ctx.rank] = error is not None
        if self._ctx.num_trainers > 1:
            dist.all_reduce(failed)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{self._ctx.name} cannot write the checkpoint: {error}. What was saved before is "
                "still there."
            ) from error
        if error is not None:
            raise error
        if failed.any():
            names = ", ".join(f"trainer{rank}" for rank in failed.nonzero().flatten().tolist())
            raise PeerFailedError(f"{names} could not do its part of a checkpoint.")

    def _entries(self) -> dict[str, TableEntry]:
        entries = {}
        for name, spec in self._tables.specs.items():
            if isinstance(spec.optimizer, SparseOptimizerSettings):
                entries[name] = TableEntry(
                    spec.num_embeddings, spec.embedding_dim, str(spec.dtype).rpartition(".")[2],
                    type(spec.optimizer).__name__, spec.optimizer.state_widths(spec.embedding_dim),
                )  # fmt: skip
        return entries

    def _differences(
        self, manifest: Manifest, wanted: dict[str, str], *, everything: bool, state: bool
    ) -> list[str]:
        """All that keeps the model from taking tables from a checkpoint."""
        found = []
        mine = self._entries()
        there = set(manifest.tables) | set(manifest.modules)
        for name, source in wanted.items():
            if name not in self._tables.specs:
                found.append(f"the model has no table '{name}'")
            elif source not in there:
                found.append(f"the checkpoint has no table '{source}'; it has {sorted(there)}")
            elif (name in mine) != (source in manifest.tables):
                found.append(f"'{source}' is a table in one and a module in the other")
            elif name in mine:
                found += _table_differences(name, mine[name], manifest.tables[source], state=state)
        if everything:
            found += [f"the model has no table '{name}'" for name in sorted(there - set(wanted))]
        return found


class PeerFailedError(CheckpointError, PeerLostError):
    """Another trainer could not do its part of a checkpoint; its own error is the cause."""


def _table_differences(name: str, mine: TableEntry, saved: TableEntry, *, state: bool) -> list[str]:
    found = [
        f"table '{name}' has {what} {getattr(mine, what)}, and had {getattr(saved, what)}"
        for what in ("embedding_dim", "dtype")
        if getattr(mine, what) != getattr(saved, what)
    ]
    if mine.num_embeddings < saved.num_embeddings:
        found.append(
            f"table '{name}' has {mine.num_embeddings} rows, fewer than the "
            f"{saved.num_embeddings} that it had"
        )
    if state and (mine.optimizer, mine.widths) != (saved.optimizer, saved.widths):
        found.append(
            f"table '{name}' has the optimizer {mine.optimizer}, and had {saved.optimizer} "
            "(state=False leaves the optimizer's state behind)"
        )
    return found


def _version() -> str:
    return str(sys.modules["hybridpar"].__version__)
