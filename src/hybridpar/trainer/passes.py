"""`Passes`: pass after pass over the data, saved and resumed as asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from hybridpar.checkpoint.folders import checkpoints
from hybridpar.trainer.batches import Batches
from hybridpar.trainer.checkpoint import Checkpoint, Position
from hybridpar.trainer.dense import copy_from
from hybridpar.trainer.profile import Profiler
from hybridpar.trainer.progress import Progress
from hybridpar.trainer.random_states import rewind
from hybridpar.trainer.saver import Saver
from hybridpar.trainer.steps import Steps
from hybridpar.trainer.watching import Watching

Batch = TypeVar("Batch")


class Resumed(NamedTuple):
    """Where to go on: how far training had come, and where this trainer's generators were."""

    position: Position
    random: Mapping[str, Any] | None


class Passes(Generic[Batch]):
    """Goes through the data with `Steps`.

    Args:
        steps: take the steps of a pass.
        saver: writes and reads checkpoints.
        holders: by name, what has a ``state_dict``, for trainers that stop early in a pass.
        settings: where and when to save, if at all.
        watching: is told of every step.
    """

    def __init__(
        self,
        steps: Steps[Batch],
        saver: Saver,
        holders: Mapping[str, Any],
        settings: Checkpoint | None,
        watching: Watching,
    ) -> None:
        self.done = 0  # passes in the life of the loop
        self._steps = steps
        self._saver = saver
        self._holders = holders
        self._settings = settings
        self._watching = watching
        self._resumed: Resumed | None = None

    def resume(self, settings: Checkpoint) -> None:
        """Go on from the newest checkpoint, if there is one."""
        self._saver.finish()
        found = checkpoints(Path(settings.directory).absolute())
        if found:
            position, own = self._saver.load(found[-1], None, dense=True, state=True)
            self.done = position.epoch
            self._resumed = Resumed(position, None if own is None else own["random"])

    def run(self, source: Batches[Batch], progress: Progress, profiler: Profiler | None) -> None:
        """One pass over the data, or the rest of one, saving as asked."""
        resumed, self._resumed = self._resumed, None
        skipped, stream = source.resumed(self.done, resumed.position if resumed else None)
        everyone = tuple(range(self._steps.ctx.num_trainers))
        settings, due = self._settings, False

        def begun() -> None:
            if resumed is not None and resumed.random is not None:
                rewind(resumed.random)
            self._watching.begin_epoch(self.done, skipped)

        def after_step(used: int, data: object, all_go_on: bool) -> None:
            nonlocal due
            step = self._steps.ctx.step or 0
            self._watching.stepped(progress)
            due = due or (
                settings is not None and settings.every is not None and step % settings.every == 0
            )
            if due and all_go_on and settings is not None:
                self._steps.model._connected_exchange.settle()
                position = Position(step, self.done, skipped + used, data)
                self._saver.save(settings, position)
                due = False
            self._saver.poll()

        stayed = self._steps.run(
            stream, progress, profiler,
            data_state=source.state, begun=begun, after_step=after_step,
        )  # fmt: skip
        if stayed != everyone:  # whoever left early takes the model of one that stayed
            copy_from(stayed[0], self._steps.ctx, self._holders)
        self.done += 1
        if settings is not None and (due or settings.every is None):
            self._saver.save(settings, Position(self._steps.ctx.step or 0, self.done, 0))
