"""`Passes`: pass after pass over the data, evaluated, saved and resumed as asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from hybridpar.checkpoint.folders import checkpoints
from hybridpar.trainer.batches import Batches
from hybridpar.trainer.checkpointing.checkpoint import Checkpoint, Position
from hybridpar.trainer.checkpointing.random_states import rewind
from hybridpar.trainer.checkpointing.saver import Saver
from hybridpar.trainer.dense import copy_from
from hybridpar.trainer.evaluation.agreement import check_alike
from hybridpar.trainer.evaluation.pace import Pace
from hybridpar.trainer.evaluation.validation import Validation
from hybridpar.trainer.observing.profile import Profiler
from hybridpar.trainer.observing.watching import Watching
from hybridpar.trainer.progress import Progress
from hybridpar.trainer.steps import Steps

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
        # A directory that the trainers' hosts do not share would leave some of them waiting.
        seen: dict[str, object] = {"newest checkpoint": found[-1].name if found else "none"}
        check_alike(self._steps.model._connected, "resume", seen)
        if found:
            position, own = self._saver.load(found[-1], None, dense=True, state=True)
            self.done = position.epoch
            self._resumed = Resumed(position, None if own is None else own["random"])

    def run(
        self,
        source: Batches[Batch],
        progress: Progress,
        profiler: Profiler | None,
        validation: Validation[Batch],
    ) -> None:
        """One pass over the data, or the rest of one, evaluating and saving as asked.

        What falls due while some trainers have run out of data is done at the end of the pass, when
        all are together again.
        """
        resumed, self._resumed = self._resumed, None
        skipped, stream = source.resumed(self.done, resumed.position if resumed else None)
        ctx, settings, cut = self._steps.ctx, self._settings, False
        evaluations = validation.pace(ctx.step or 0)
        saves = Pace(None if settings is None else settings.every, ctx.step or 0)

        def begun() -> None:
            if resumed is not None and resumed.random is not None:
                rewind(resumed.random)
            self._watching.begin_epoch(self.done, skipped)

        def after_step(used: int, data: object, all_go_on: bool) -> bool:
            nonlocal cut
            step = ctx.step or 0
            self._watching.stepped(progress)
            if all_go_on:
                position = Position(step, self.done, skipped + used, data)
                if evaluations.is_due(step):
                    self._watching.evaluated(validation.evaluate(position))
                cut = validation.is_over
                self._save(position, due=saves.is_due(step) or (cut and saves.is_never))
            self._saver.poll()
            return cut

        stayed = self._steps.run(
            stream, progress, profiler,
            data_state=source.state, begun=begun, after_step=after_step,
        )  # fmt: skip
        if cut:
            return
        if len(stayed) < ctx.num_trainers:  # whoever left early takes the model of one that stayed
            copy_from(stayed[0], ctx, self._holders)
        self.done += 1
        position = Position(ctx.step or 0, self.done, 0)
        if evaluations.is_due(position.step) or validation.ends_epochs:
            self._watching.evaluated(validation.evaluate(position))
        self._save(position, due=saves.is_due(position.step) or saves.is_never)

    def _save(self, position: Position, *, due: bool) -> None:
        if due and self._settings is not None:
            self._steps.model._connected_exchange.settle()
            self._saver.save(self._settings, position)
