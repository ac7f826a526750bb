"""`EarlyStopping`: when to end training that no longer helps; `Patience`: how far that has come."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hybridpar.errors import SpecError


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStopping:
    """Ends :meth:`TrainerLoop.fit` when its evaluations have not improved for some time.

    All trainers see the same results, so all stop at the same step.

    Args:
        monitor: which result to look at: ``"loss"`` or a metric's name.
        mode: whether it should be small, ``"min"``, or great, ``"max"``.
        patience: after so many evaluations in a row that are no better than the best, training
            ends. NaN is never better.
        min_delta: by how much more than this it must be better to count.
        restore_best: whether to end with the model as it was at its best, with all that trains it.
            It is kept in the folder ``best`` of the loop's checkpoints, so the loop needs those.

    Raises:
        SpecError: if a setting is none of these.
    """

    monitor: str = "loss"
    mode: Literal["min", "max"] = "min"
    patience: int = 3
    min_delta: float = 0.0
    restore_best: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise SpecError(f"EarlyStopping got mode={self.mode!r}. Choose 'min' or 'max'.")
        patience: object = self.patience
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise SpecError(
                f"EarlyStopping got patience={patience!r}. Give a whole number of at least 1."
            )
        if not 0 <= self.min_delta < math.inf:
            raise SpecError(
                f"EarlyStopping got min_delta={self.min_delta!r}. Give a number of at least 0."
            )


class Patience:
    """What an `EarlyStopping` has seen; kept in checkpoints.

    Attributes:
        best_step: the step of the best evaluation, None before the first.
    """

    def __init__(self, settings: EarlyStopping) -> None:
        self.settings = settings
        self.best_step: int | None = None
        self._best = math.nan
        self._waited = 0

    def see(self, step: int, results: Mapping[str, float]) -> bool:
        """Take in the results of an evaluation; whether they are the best.

        Raises:
            SpecError: if what is monitored is not among them.
        """
        name = self.settings.monitor
        if name not in results:
            raise SpecError(
                f"EarlyStopping monitors {name!r}, which was not evaluated, but "
                f"{', '.join(map(repr, results))} was."
            )
        value = results[name]
        gain = value - self._best if self.settings.mode == "max" else self._best - value
        first = math.isnan(self._best) and not math.isnan(value)
        better = first or gain > self.settings.min_delta
        self._waited = 0 if better else self._waited + 1
        if better:
            self._best, self.best_step = value, step
        return better

    @property
    def is_over(self) -> bool:
        """Whether training is to end."""
        return self._waited >= self.settings.patience

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` takes."""
        return {"best": self._best, "best_step": self.best_step, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._best, self.best_step = state["best"], state["best_step"]
        self._waited = state["waited"]
