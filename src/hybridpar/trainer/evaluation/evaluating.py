"""`Evaluating`: what a `TrainerLoop` offers to evaluate its model, by itself or while it trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

from hybridpar.metrics import Metric
from hybridpar.trainer.checkpointing.saving import Saving
from hybridpar.trainer.evaluation.best import BestModel
from hybridpar.trainer.evaluation.evaluator import Evaluator, Inputs
from hybridpar.trainer.evaluation.validation import EvalSettings, Validation

Batch = TypeVar("Batch")


class Evaluating(Saving, Generic[Batch]):
    """Mixed into :class:`TrainerLoop`."""

    _evaluator: Evaluator[Batch]
    _holders: dict[str, Any]
    _fits = 0

    def evaluate(
        self,
        batches: Iterable[Batch],
        *,
        metrics: Mapping[str, Metric] | None = None,
        inputs: Inputs | None = None,
    ) -> dict[str, float]:
        """The mean loss over all trainers' samples, as ``"loss"``, and metrics.

        Every trainer calls it, each with batches of its own, as many as it has, or none; all get
        the same results, which do not depend on who has which batch. Modules are in eval mode, on
        the servers too. Nothing is trained, and what was left is found again: modes, gradients,
        random generators. (Only a table with ``max_norm`` scales the rows that are looked up, as in
        torch.) In async and bounded mode all updates so far are applied first.

        Args:
            batches: this trainer's.
            metrics: of :mod:`hybridpar.metrics`, by name; each is reset first.
            inputs: called with (output, batch), their tensors on ``ctx.device``; returns what the
                metrics take: (predictions, target) or (predictions, target, weights), or a dict
                from metrics' names to such.

        Returns:
            The results by name. A batch's loss counts as often as the first tensor of the output
            has rows, or as the loop's ``samples`` says.

        Raises:
            InputError: if no trainer has a batch, or a batch is refused as in :meth:`fit`.
            SpecError: if a metric is none, or the trainers' metrics differ.
        """
        return self._evaluator.evaluate(batches, metrics or {}, inputs)

    def _validation(self, settings: EvalSettings[Batch]) -> Validation[Batch]:
        """What evaluates during a fit, checked with all trainers."""
        settings.check()
        self._fits += 1
        settings.check_alike(self.model._connected, self._fits)
        keeps_best = settings.stopping is not None and settings.stopping.restore_best
        best = BestModel(self._ctx, self._saver, self._settings()) if keeps_best else None
        validation = Validation(self._evaluator, settings, best)
        self._holders.pop("early stopping", None)
        if validation.patience is not None:
            self._holders["early stopping"] = validation.patience
        return validation
