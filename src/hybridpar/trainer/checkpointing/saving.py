"""`Saving`: what a `TrainerLoop` offers to save its model, or to take another from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridpar.checkpoint.folders import newest
from hybridpar.errors import SpecError
from hybridpar.trainer.checkpointing.checkpoint import Checkpoint, Position
from hybridpar.trainer.checkpointing.saver import Saver
from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.model import HybridModel
from hybridpar.trainer.passes import Passes


class Saving:
    """Mixed into :class:`TrainerLoop`."""

    model: HybridModel[Any]
    _ctx: TrainerContext
    _checkpoint: Checkpoint | None
    _saver: Saver
    _passes: Passes[Any]

    def save(self) -> None:
        """Save now, between two calls of :meth:`fit`. Every trainer calls it.

        Raises:
            CheckpointError: if a trainer or a server cannot write; what was saved before stays.
            SpecError: if the loop was built without ``checkpoint``.
        """
        settings = self._settings()
        self.model._connected_exchange.settle()
        self._saver.save(settings, Position(self._ctx.step or 0, self._passes.done, 0))
        self._saver.finish()

    def load(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        tables: Mapping[str, str] | Sequence[str] | None = None,
        dense: bool = True,
        state: bool = True,
    ) -> int:
        """Take the model from a checkpoint. Every trainer calls it.

        The numbers of trainers and servers, and how tables are cut, may be others than they were. A
        table may have more rows than it had: new ones keep their initial values.

        Args:
            directory: a checkpoint's folder, or one with several, whose newest is taken; None takes
                the loop's own.
            tables: names of the tables and hosted modules to take; or a mapping from them to the
                names that they had in the checkpoint. None takes all.
            dense: whether to take the dense half, with its optimizer, the schedulers and so on.
            state: whether to take the state of the tables' optimizers.

        Returns:
            The optimizer steps that had been done.

        Raises:
            CheckpointError: if there is none, it is damaged, or it does not fit; all differences
                are listed.
        """
        where = self._settings().directory if directory is None else directory
        names = tables if tables is None or isinstance(tables, Mapping) else {n: n for n in tables}
        self._saver.finish()
        self.model._connected_exchange.settle()
        folder = newest(Path(where).absolute())
        position, _ = self._saver.load(folder, names, dense=dense, state=state)
        return position.step

    def _settings(self) -> Checkpoint:
        if self._checkpoint is None:
            raise SpecError(
                "The loop has no checkpoint setting. Build it with "
                "TrainerLoop(checkpoint=hybridpar.Checkpoint(directory))."
            )
        return self._checkpoint
