"""`Validation`: the evaluations of a `fit`, and whether they end it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from hybridpar.callbacks.records import Evaluation
from hybridpar.errors import SpecError
from hybridpar.metrics import Metric
from hybridpar.trainer.checkpointing.checkpoint import Position
from hybridpar.trainer.evaluation.agreement import check_alike
from hybridpar.trainer.evaluation.best import BestModel
from hybridpar.trainer.evaluation.early_stopping import EarlyStopping, Patience
from hybridpar.trainer.evaluation.evaluator import Evaluator, Inputs, check_metrics, kinds_of
from hybridpar.trainer.evaluation.pace import Pace
from hybridpar.trainer.progress import FitResult
from hybridpar.trainer.tables import RemoteTables

Batch = TypeVar("Batch")
EvalBatches = Iterable[Batch] | Callable[[], Iterable[Batch]]


@dataclass(frozen=True, kw_only=True)
class EvalSettings(Generic[Batch]):
    """What :meth:`TrainerLoop.fit` was told of evaluation; see there."""

    batches: EvalBatches[Batch] | None
    every: int | None
    metrics: Mapping[str, Metric] | None
    inputs: Inputs | None
    stopping: EarlyStopping | None

    def check(self) -> None:
        """Refuse what cannot be done, or goes without an evaluation that there is none of."""
        if self.batches is None:
            others = {"eval_every": self.every, "metrics": self.metrics, "inputs": self.inputs,
                      "early_stopping": self.stopping}  # fmt: skip
            given = [name for name, value in others.items() if value is not None]
            if given:
                raise SpecError(f"fit got {', '.join(given)}, but no eval_batches to evaluate.")
            return
        if isinstance(self.batches, Iterator):
            raise SpecError(
                "eval_batches is an iterator, which can be gone through once. Give a list, a "
                "DataLoader, or a function that returns an iterable."
            )
        every: object = self.every
        if every is not None and (
            not isinstance(every, int) or isinstance(every, bool) or every < 1
        ):
            raise SpecError(
                f"eval_every is {every!r}. Give optimizer steps, at least 1; None evaluates at the "
                "end of every epoch."
            )
        check_metrics(self.metrics or {}, self.inputs)
        if self.stopping is None:
            return
        if not isinstance(self.stopping, EarlyStopping):
            raise SpecError(
                f"early_stopping is {self.stopping!r}. Give hybridpar.EarlyStopping(monitor=...)."
            )
        known = ["loss", *(self.metrics or {})]
        if self.stopping.monitor.partition("/")[0] not in known:
            raise SpecError(
                f"EarlyStopping monitors {self.stopping.monitor!r}. There are "
                f"{', '.join(map(repr, known))}: give fit that metric, or monitor another."
            )

    def check_alike(self, tables: RemoteTables, number: int) -> None:
        """Refuse settings that differ between trainers. Collective."""
        alike: dict[str, object] = {
            "eval_batches": "none" if self.batches is None else "some",
            "eval_every": self.every,
            "metrics": kinds_of(self.metrics or {}),
            "early_stopping": self.stopping,
        }
        check_alike(tables, f"fit {number}", alike)


class Validation(Generic[Batch]):
    """Evaluates during one `fit`, whenever it is due, on all trainers at the same step.

    Args:
        evaluator: evaluates.
        settings: what with, and when.
        best: keeps the best model, if that is asked for.
    """

    def __init__(
        self, evaluator: Evaluator[Batch], settings: EvalSettings[Batch], best: BestModel | None
    ) -> None:
        self._evaluator = evaluator
        self._settings = settings
        self._best = best
        self._evaluations: list[Evaluation] = []
        self.patience = None if settings.stopping is None else Patience(settings.stopping)

    def resumed(self, step: int) -> None:
        """The fit goes on from a checkpoint of this step, or from the beginning."""
        if self._best is not None:
            self._best.resumed(step)

    @property
    def is_over(self) -> bool:
        """Whether training is to end."""
        return self.patience is not None and self.patience.is_over

    def pace(self, step: int) -> Pace:
        """When to evaluate between the steps of a pass that begins now."""
        given = self._settings.batches is not None
        return Pace(self._settings.every if given else None, step)

    @property
    def ends_epochs(self) -> bool:
        """Whether to evaluate at the end of every epoch."""
        return self._settings.batches is not None and self._settings.every is None

    def evaluate(self, position: Position) -> Evaluation:
        """Evaluate now. Every trainer is at the same step, and no step is under way."""
        source: Any = self._settings.batches
        batches = source() if callable(source) and not isinstance(source, Iterable) else source
        results = self._evaluator.evaluate(
            batches, self._settings.metrics or {}, self._settings.inputs
        )
        evaluation = Evaluation(
            step=position.step, epoch=position.epoch, results=results, time=time.time()
        )
        self._evaluations.append(evaluation)
        if self.patience is not None and self.patience.see(position.step, results) and self._best:
            self._best.save(position)
        return evaluation

    def finished(self, result: FitResult) -> FitResult:
        """The result of the fit, with what was evaluated; the model is the best one, if asked."""
        if self._best is not None and self.patience is not None:
            self._best.restore(self.patience)
        return replace(result, evaluations=tuple(self._evaluations), stopped_early=self.is_over)
