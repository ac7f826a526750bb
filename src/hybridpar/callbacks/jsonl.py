"""`JSONL`: a run as a file of JSON lines, from which `hybridpar report` makes a page."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO

from typing_extensions import override

from hybridpar.callbacks.logger import Interval, Logger, drop_cut_line
from hybridpar.callbacks.records import End, Evaluation, Failure, Run, Saved, Step, as_json
from hybridpar.errors import describe

FORMAT = 1


def entry_of(record: Run | Evaluation | Saved | End | Failure) -> dict[str, object]:
    """A record that is no step as an entry: what JSON can hold."""
    if isinstance(record, Failure):
        end = as_json(record.end)
        assert isinstance(end, dict)
        return {"record": "failure", "error": describe(record.error), **end}
    entry = as_json(record)
    assert isinstance(entry, dict)
    names = {Run: "start", Evaluation: "evaluation", Saved: "checkpoint", End: "end"}
    version = {"format": FORMAT} if isinstance(record, Run) else {}
    return {"record": names[type(record)], **version, **entry}


def step_entry(interval: Interval, step: Step) -> dict[str, object]:
    """Some steps as one entry."""
    return {
        "record": "step",
        "step": step.step,
        "epoch": step.epoch,
        "time": step.time,
        "loss": as_json(step.loss),
        "steps": interval.steps,
        "skipped": interval.skipped,
        "samples": interval.samples,
        "samples_of_all": interval.of_all,
        "seconds": interval.seconds,
        "waiting": interval.waiting,
        "metrics": as_json(step.metrics),
    }


class JSONL(Logger):
    """Writes a run as one JSON object a line: its start with the plan, steps, evaluations, its end.

    Each line is on the disk's way as soon as it is written, so that the file of a job that was
    killed has all but the last moment. A fit that goes on from an earlier step, after a resume or
    in the same loop, is added to the file; any other begins it anew.

    Args:
        path: the file; its folder is made.
        every: as for every logger: optimizer steps between two entries.

    Example:
        >>> def train(ctx):
        ...     loop = TrainerLoop(..., callbacks=[callbacks.JSONL("run.jsonl", every=10)])
    """

    def __init__(self, path: str | os.PathLike[str], *, every: int = 1) -> None:
        super().__init__(every)
        self._path = Path(path)
        self._file: IO[str] | None = None
        self._begun = False

    @override
    def on_start(self, run: Run) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if run.step and self._path.is_file():
            drop_cut_line(self._path)
        self._file = self._path.open("a" if run.step else "w", encoding="utf-8")
        self._begun = True
        self._write(entry_of(run))

    @override
    def write(self, interval: Interval, step: Step) -> None:
        self._write(step_entry(interval, step))

    @override
    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._write(entry_of(evaluation))

    @override
    def on_checkpoint(self, checkpoint: Saved) -> None:
        self._write(entry_of(checkpoint))

    @override
    def close(self, record: End | Failure) -> None:
        self._write(entry_of(record))
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, entry: dict[str, object]) -> None:
        line = json.dumps(entry) + "\n"
        if self._file is not None:
            self._file.write(line)
            self._file.flush()
        elif self._begun:  # between two fits
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
