"""`LearningRateMonitor` and `StalenessMonitor`: they measure, and the loggers write it down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from typing_extensions import override

from hybridpar.callbacks.callback import Callback
from hybridpar.callbacks.records import Run, Step


class LearningRateMonitor(Callback):
    """Adds the learning rates that a step used to its metrics: ``"lr/dense"``, ``"lr/sparse"``.

    An optimizer with several groups has one for each: ``"lr/dense/0"``, ``"lr/sparse/item+user"``.
    """

    on_every_trainer: ClassVar[bool] = False

    def __init__(self) -> None:
        self._run: Run | None = None
        self._used: dict[str, float] = {}
        self._next: dict[str, float] = {}
        self._step = -1

    @override
    def on_start(self, run: Run) -> None:
        self._run = run
        self._step = run.step
        self._next = self._now()

    @override
    def on_step(self, step: Step) -> None:
        if step.step != self._step:  # the schedulers have stepped: these are the next step's
            self._step = step.step
            self._used, self._next = self._next, self._now()

    @override
    def measure(self, step: Step) -> Mapping[str, float]:
        self.on_step(step)
        return self._used

    def _now(self) -> dict[str, float]:
        rates = {} if self._run is None else self._run.learning_rates()
        return {f"lr/{name}": rate for name, rate in rates.items()}


class StalenessMonitor(Callback):
    """Adds by how many steps the newest rows were behind to a step's metrics, for each table.

    ``"staleness/item"`` is the mean over the lookups since the step before; 0 in sync mode.
    """

    on_every_trainer: ClassVar[bool] = False

    def __init__(self) -> None:
        self._before: dict[str, dict[int, int]] = {}
        self._measured: dict[str, float] = {}
        self._step = -1

    @override
    def on_start(self, run: Run) -> None:
        self._step = run.step

    @override
    def on_step(self, step: Step) -> None:
        if step.step == self._step:
            return
        self._step = step.step
        for table, counts in step.staleness.items():
            before = self._before.get(table, {})
            since = {behind: n - before.get(behind, 0) for behind, n in counts.items()}
            lookups = sum(since.values())
            if lookups:
                total = sum(behind * n for behind, n in since.items())
                self._measured[f"staleness/{table}"] = total / lookups
            self._before[table] = dict(counts)

    @override
    def measure(self, step: Step) -> Mapping[str, float]:
        self.on_step(step)
        return dict(self._measured)
