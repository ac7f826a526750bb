"""`FitResult`, and the counting that leads to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from hybridpar.callbacks.records import Evaluation
from hybridpar.trainer.observing.profile import StepProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """What one call of :meth:`TrainerLoop.fit` did on this trainer.

    Attributes:
        steps: number of optimizer steps, all epochs together.
        first_loss: loss of the first step; NaN if there was none.
        last_loss: loss of the last step; NaN if there was none.
        epoch_losses: for each epoch, the mean of this trainer's losses; NaN if there was none. The
            loss of a skipped step counts nowhere.
        seconds: wall-clock time.
        skipped: how many of the steps all trainers skipped: because a gradient overflowed under
            loss scaling, or a value was not finite and the loop has ``non_finite="skip"``.
        staleness: for each table, how often the rows of a batch lacked so many steps of the
            slowest trainer: ``{"item": {0: 2, 1: 98}}``. All 0 in sync mode. Counted over the
            loop's life.
        profile: where the time went, if asked for.
        evaluations: what was evaluated meanwhile, in order.
        stopped_early: whether ``early_stopping`` ended training.
    """

    steps: int
    first_loss: float
    last_loss: float
    epoch_losses: tuple[float, ...]
    seconds: float
    skipped: int = 0
    staleness: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    profile: StepProfile | None = None
    evaluations: tuple[Evaluation, ...] = ()
    stopped_early: bool = False

    @property
    def steps_per_second(self) -> float:
        """Steps a second; 0 if there was none."""
        return self.steps / self.seconds if self.seconds else 0.0


class Progress:
    """Counts steps and sums losses without keeping one number a step."""

    def __init__(self) -> None:
        self.skipped = 0
        self.latest: Tensor | None = None  # the last step's loss, skipped or not
        self._steps = 0
        self._first: Tensor | None = None
        self._last: Tensor | None = None
        self._sums: list[Tensor | None] = []
        self._counts: list[int] = []

    def begin_epoch(self) -> None:
        """The losses that come are of a new epoch."""
        self._sums.append(None)
        self._counts.append(0)

    def add(self, loss: Tensor, *, skipped: bool = False) -> None:
        """Count one step, and its loss, a scalar tensor, unless the step was skipped."""
        self._steps += 1
        self.latest = loss
        self.skipped += skipped
        if skipped:
            return
        self._first = loss if self._first is None else self._first
        self._last = loss
        total = self._sums[-1]
        self._sums[-1] = loss.double() if total is None else total + loss
        self._counts[-1] += 1

    @property
    def steps(self) -> int:
        """How many so far."""
        return self._steps

    def result(
        self,
        seconds: float,
        staleness: Mapping[str, Mapping[int, int]],
        profile: StepProfile | None,
    ) -> FitResult:
        """All of it."""
        return FitResult(
            steps=self._steps,
            first_loss=_mean(self._first, 1),
            last_loss=_mean(self._last, 1),
            epoch_losses=tuple(map(_mean, self._sums, self._counts)),
            seconds=seconds,
            skipped=self.skipped,
            staleness={table: dict(sorted(counts.items())) for table, counts in staleness.items()},
            profile=profile,
        )


def _mean(total: Tensor | None, count: int) -> float:
    return float("nan") if total is None else float(total) / count
