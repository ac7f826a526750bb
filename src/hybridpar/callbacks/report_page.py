"""`Report`: an HTML page on a run, written at its end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from hybridpar.callbacks.jsonl import entry_of, step_entry
from hybridpar.callbacks.logger import Interval, Logger
from hybridpar.callbacks.records import End, Evaluation, Failure, Run, Saved, Step
from hybridpar.report.collected import Collected
from hybridpar.report.page import page
from hybridpar.report.planned import planned_traffic


class Report(Logger):
    """Writes one self-contained HTML page on a fit at its end, or when it fails.

    A page without curves is written as the fit begins: a path that cannot be written is told of
    then. It has the curves, where a step's time went, what each server moved, staleness, the plan,
    the settings. Later fits of the same loop are added to it. What it keeps until then is bounded:
    long curves are thinned out. ``hybridpar report`` makes the same page of a :class:`JSONL` log,
    also of a job that was killed.

    Args:
        path: the page; its folder is made.
        every: as for every logger: optimizer steps between two points of the curves.
        title: the page's title.
        plan: what was planned, to be shown beside what is measured: ``hybridpar.plan(...)`` of as
            many trainers and servers, with a sample of batches, as ``to_dict()`` gives it.

    Raises:
        SpecError: when a fit begins, if the plan is none, or for another cluster.

    Example:
        >>> def train(ctx):
        ...     loop = TrainerLoop(..., report="run.html")
    """

    on_every_trainer: ClassVar[bool] = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int = 1,
        title: str = "hybridpar run",
        plan: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(every)
        self._path = Path(path)
        self._title = title
        self._plan = plan
        self._collected = Collected(plan)

    @override
    def on_start(self, run: Run) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not run.step:
            self._collected = Collected(self._plan)
        self._collected.add(entry_of(run))
        if self._plan is not None:
            planned_traffic(self._plan, self._collected.start)
        self._publish()  # a path that cannot be written is told of now, not after hours

    @override
    def write(self, interval: Interval, step: Step) -> None:
        self._collected.add(step_entry(interval, step))

    @override
    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._collected.add(entry_of(evaluation))

    @override
    def on_checkpoint(self, checkpoint: Saved) -> None:
        self._collected.add(entry_of(checkpoint))

    @override
    def close(self, record: End | Failure) -> None:
        self._collected.add(entry_of(record))
        if self._collected.start:
            self._publish()

    def _publish(self) -> None:
        """Write the page beside the old one, and put it in its place."""
        beside = self._path.with_name(self._path.name + ".new")
        beside.write_text(page(self._collected, self._title), encoding="utf-8")
        beside.replace(self._path)
