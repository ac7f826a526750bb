"""`CSV`: steps and evaluations as a table in a file."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from typing_extensions import override

from hybridpar.callbacks.logger import Interval, Logger, drop_cut_line, scalars_of
from hybridpar.callbacks.records import End, Evaluation, Failure, Run, Step

_FIRST = ("step", "epoch", "time")


class CSV(Logger):
    """Writes a row for each entry: step, epoch, time, loss, rates, metrics.

    An evaluation is a row too, with a column for each of its results. A name that is new gets a
    column of its own, for which the file is written once more. What begins the file anew, and what
    adds to it, is as for :class:`JSONL`.

    Args:
        path: the file; its folder is made.
        every: as for every logger: optimizer steps between two entries.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: int = 1) -> None:
        super().__init__(every)
        self._path = Path(path)
        self._columns: list[str] = []
        self._file: IO[str] | None = None

    @override
    def on_start(self, run: Run) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        goes_on = run.step > 0 and self._path.is_file()
        if goes_on:
            drop_cut_line(self._path)
        self._columns = self._read_columns() if goes_on else []
        self._file = self._path.open("a" if goes_on else "w", newline="", encoding="utf-8")

    @override
    def write(self, interval: Interval, step: Step) -> None:
        self._row(step, {**scalars_of(interval, step), "samples": interval.samples})

    @override
    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._row(evaluation, evaluation.results)

    @override
    def close(self, record: End | Failure) -> None:
        self._close()

    def _row(self, record: Step | Evaluation, values: Mapping[str, float]) -> None:
        if not self._columns and self._file is None:  # no fit has begun
            return
        between = self._file is None
        if self._file is None:
            self._file = self._path.open("a", newline="", encoding="utf-8")
        row = {**{name: getattr(record, name) for name in _FIRST}, **values}
        new = [name for name in row if name not in self._columns]
        if new:
            self._add_columns(new)
        csv.DictWriter(self._file, self._columns).writerow(row)
        self._file.flush()
        if between:
            self._close()

    def _add_columns(self, names: list[str]) -> None:
        self._close()
        rows: list[dict[str, str]] = []
        if self._columns:
            with self._path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        self._columns += names
        beside = self._path.with_name(self._path.name + ".new")
        with beside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        beside.replace(self._path)
        self._file = self._path.open("a", newline="", encoding="utf-8")

    def _read_columns(self) -> list[str]:
        with self._path.open(newline="", encoding="utf-8") as file:
            return next(csv.reader(file), [])

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
