"""`BestModel`: the model as it was at its best evaluation, kept beside the other checkpoints."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from hybridpar.checkpoint.folders import checkpoints, keep_only, name_of
from hybridpar.trainer.checkpointing.checkpoint import Checkpoint, Position
from hybridpar.trainer.checkpointing.saver import Saver
from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.evaluation.early_stopping import Patience


class BestModel:
    """Saves the best model, and brings it back. Every trainer calls alike.

    Args:
        ctx: this trainer's context.
        saver: writes and reads checkpoints.
        settings: the loop's own checkpoints, in whose folder ``best`` it is.
    """

    def __init__(self, ctx: TrainerContext, saver: Saver, settings: Checkpoint) -> None:
        self._ctx = ctx
        self._saver = saver
        self._folder = Path(settings.directory).absolute() / "best"
        self._settings = replace(
            settings, directory=self._folder, keep=sys.maxsize, every_full=None, wait=True
        )

    def save(self, position: Position) -> None:
        """This is the best one: in place of what was.

        What was the best when a checkpoint was taken that is still there stays with it: a run
        that is resumed from that checkpoint may find no better one.
        """
        self._saver.save(self._settings, position)
        if self._ctx.rank == 0:
            there = self._names()
            kept = [max((best for best in there if best <= taken.name), default="")
                    for taken in checkpoints(self._folder.parent)]  # fmt: skip
            keep_only(self._folder, {name_of(position.step), *kept})

    def resumed(self, step: int) -> None:
        """Training goes on from this step: what was the best after it is so no more."""
        if self._ctx.rank == 0:
            keep_only(self._folder, [best for best in self._names() if best <= name_of(step)])

    def restore(self, patience: Patience) -> None:
        """Take the best model, with its optimizers; steps are counted on."""
        if patience.best_step is None:
            return
        step, seen = self._ctx.step, patience.state_dict()
        self._saver.finish()
        self._saver.load(self._folder / name_of(patience.best_step), None, dense=True, state=True)
        self._ctx.step = step
        patience.load_state_dict(seen)

    def _names(self) -> list[str]:
        return [folder.name for folder in checkpoints(self._folder)]
