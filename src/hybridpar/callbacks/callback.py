"""`Callback`: what happens in a fit, told to whoever wants to know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from hybridpar.callbacks.records import End, Evaluation, Failure, Run, Saved, Step


class Callback:
    """Told what happens in :meth:`TrainerLoop.fit`; every method does nothing unless overridden.

    Callbacks are called in their order, in the trainer's main thread, between two steps: while one
    runs, the other trainers may wait for this one. One that raises ends the job with a
    :class:`CallbackError` that names it.

    Attributes:
        on_every_trainer: whether every trainer calls it, or trainer 0 alone. The callbacks of
            hybridpar itself, which write files, are for trainer 0.

    Example:
        >>> class StopsAtNaN(Callback):
        ...     def on_step(self, step):
        ...         if step.step % 100 == 0 and step.loss != step.loss:
        ...             raise ValueError(f"the loss is NaN after {step.step} steps")
    """

    on_every_trainer: ClassVar[bool] = True

    def on_start(self, run: Run) -> None:
        """A fit begins."""

    def on_step(self, step: Step) -> None:
        """An optimizer step is done."""

    def measure(self, step: Step) -> Mapping[str, float]:  # noqa: ARG002 - for subclasses
        """More to say of a step, by name: what :attr:`Step.metrics` is made of.

        Called when another callback first looks at a step's metrics.
        """
        return {}

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """An evaluation is done."""

    def on_checkpoint(self, checkpoint: Saved) -> None:
        """A checkpoint has become current. Called on trainer 0 alone."""

    def on_end(self, end: End) -> None:
        """The fit is done."""

    def on_failure(self, failure: Failure) -> None:
        """An exception ends the fit; it goes on once all callbacks were told.

        A trainer that is killed cannot tell. What is raised here is logged, and goes no further.
        """
