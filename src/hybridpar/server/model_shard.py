"""`ModelShard`: what one server holds of one model, read and updated as a whole."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpar.checkpoint.files import FileEntry, read_state, write_state
from hybridpar.checkpoint.manifest import ShardEntry
from hybridpar.messages import Lookups, Pooled, ServedModel, Update
from hybridpar.server.hosted import HostedModule
from hybridpar.server.lanes import ONE_LANE, Lanes
from hybridpar.server.saved_rows import SavedRows
from hybridpar.server.slab import Slab
from hybridpar.shared_memory import Handle


class Written(NamedTuple):
    """What a server has written: shards of tables, and a file a module."""

    shards: list[ShardEntry]
    modules: dict[str, FileEntry]


class ModelShard:
    """The slabs and hosted modules of one model on this server.

    Args:
        served: what to hold.
    """

    def __init__(self, served: ServedModel) -> None:
        specs = {spec.name: spec for spec in served.specs}
        # The model's number too: one model after another starts from other values.
        seed = f"{served.request.seed}/{served.model_id}"
        self._slabs = [Slab(layout, specs, seed) for layout in served.layouts]
        self._modules = {name: HostedModule(specs[name], seed) for name in served.modules}
        self._held: dict[str, Any] = {}
        self._wire_dtype = served.request.wire_dtype
        self._lock = threading.Lock()

    def lookup(self, lookups: Lookups | None, behind: int = 0) -> Pooled:
        """The rows and outputs that a trainer wants, as they are now."""
        if lookups is None:
            return Pooled(tuple(None for _ in self._slabs))
        for name, call_number in lookups.released:
            self._modules[name].release(lookups.rank, call_number)
        return Pooled(
            tuple(
                None if lookup is None else slab.lookup(lookup).to(self._wire_dtype)
                for slab, lookup in zip(self._slabs, lookups.slabs, strict=True)
            ),
            tuple(
                self._modules[call.module].forward(lookups.rank, call) for call in lookups.modules
            ),
            behind,
        )

    @property
    def handles(self) -> tuple[Handle | None, ...]:
        """For each slab, by what a trainer on this machine reads its weight; None if it asks."""
        return tuple(slab.handle for slab in self._slabs)

    @property
    def lock(self) -> threading.Lock:
        """Held by an update; a lookup beside updates on arrival holds it, so as to see it whole."""
        return self._lock

    def apply(
        self, updates: Mapping[int, Update], divisor: int, *, t: int, lanes: Lanes = ONE_LANE
    ) -> None:
        """One optimizer step with the trainers' gradients, in rank order.

        Args:
            updates: each trainer's part, by rank.
            divisor: what the sum of the gradients is divided by.
            t: how many steps there have been, this one included.
            lanes: as for :meth:`Slab.apply`.
        """
        with self._lock:
            if any(update.skip for update in updates.values()):
                return
            first = next(iter(updates.values()))
            for index, slab in enumerate(self._slabs):
                pushes = [push for update in updates.values() for push in update.slabs[index]]
                scale = 1.0 if first.scales is None else first.scales[index]
                slab.apply(
                    pushes, lr=first.lrs[index], divisor=divisor, t=t, scale=scale, lanes=lanes
                )
            for name, module in self._modules.items():
                gradients = [
                    (rank, [push for push in update.modules if push.module == name])
                    for rank, update in updates.items()
                ]
                module.apply(gradients, divisor, first.module_lrs[name])

    def gradient_squares(self, updates: Mapping[int, Update], divisor: int) -> tuple[float, ...]:
        """For each slab that clips by norm, the squared norm of its gradient; 0 for the others."""
        return tuple(
            slab.gradient_square(
                [push for update in updates.values() for push in update.slabs[index]], divisor
            )
            if slab.clips_norm
            else 0.0
            for index, slab in enumerate(self._slabs)
        )

    def hold(self, *, touched_only: bool, track: bool) -> None:
        """Hold on to the values of this moment, for :meth:`write`; as :meth:`Slab.hold`."""
        with self._lock:
            for slab in self._slabs:
                slab.hold(touched_only=touched_only, track=track)
            self._held = {name: module.checkpoint() for name, module in self._modules.items()}

    def write(self, folder: Path, name: str) -> Written:
        """Write the values held into a checkpoint, while updates go on."""
        shards = [
            shard
            for number, slab in enumerate(self._slabs)
            for shard in slab.write(folder, f"{name}.slab{number}")
        ]
        modules = {
            module: write_state(folder, f"{name}.module{number}.pt", state)
            for number, (module, state) in enumerate(self._held.items())
        }
        self._held = {}
        return Written(shards, modules)

    def load(self, folder: Path, tables: Mapping[str, str], *, state: bool) -> None:
        """Take tables and modules from a checkpoint.

        Args:
            folder: the checkpoint's own.
            tables: for each table or module here, the one there that it is taken from.
            state: whether to take the optimizers' state too.
        """
        source = SavedRows(folder)
        with self._lock:
            for slab in self._slabs:
                slab.load(source, tables, state=state)
            for name, module in self._modules.items():
                if name in tables:
                    entry = source.manifest.modules[tables[name]]
                    module.restore(read_state(folder, entry), optimizer=state)

    def read(self, slab: int, what: str, rows: Tensor) -> Tensor:
        """Rows of one slab's weight or state."""
        with self._lock, torch.no_grad():
            return self._slabs[slab].read(what, rows)

    def set_rows(self, slab: int, rows: Tensor, values: Tensor, *, reset_state: bool) -> None:
        """Write rows of one slab, between two updates."""
        with self._lock, torch.no_grad():
            self._slabs[slab].set_rows(rows, values, reset_state=reset_state)

    def set_module_state(self, name: str, state: dict[str, Tensor]) -> None:
        """Give a hosted module other parameters and buffers, between two updates."""
        with self._lock:
            self._modules[name].replace(state)

    def module_state(self, name: str) -> dict[str, Tensor]:
        """A hosted module's parameters and buffers."""
        with self._lock:
            return self._modules[name].state_dict()

    @property
    def module_lrs(self) -> dict[str, list[float]]:
        """The learning rates that the hosted modules' optimizers were built with."""
        return {name: module.lrs for name, module in self._modules.items()}
