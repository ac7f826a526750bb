"""`Logger`: what callbacks that write down steps have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from hybridpar.callbacks.callback import Callback
from hybridpar.callbacks.records import End, Failure, Step
from hybridpar.errors import SpecError

_BLOCK = 1 << 16


@dataclass(slots=True)
class Interval:
    """Sums over some steps, the last of which is ``last``."""

    steps: int = 0
    skipped: int = 0
    samples: int = 0
    of_all: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    last: Step | None = None

    def add(self, step: Step) -> None:
        """Count one more step."""
        self.steps += 1
        self.skipped += step.skipped
        self.samples += step.samples
        self.of_all += step.samples * step.num_trainers
        self.seconds += step.seconds
        self.waiting += step.waiting
        self.last = step

    @property
    def steps_per_second(self) -> float:
        """Steps a second."""
        return self.steps / self.seconds if self.seconds else 0.0

    @property
    def samples_per_second(self) -> float:
        """Samples a second of the job, taking the others' batches to be as large as this one's."""
        return self.of_all / self.seconds if self.seconds else 0.0

    @property
    def waiting_share(self) -> float:
        """The share of the time in which this trainer waited for servers."""
        return self.waiting / self.seconds if self.seconds else 0.0


class Logger(Callback):
    """Writes down every so many steps what they were, on trainer 0.

    Args:
        every: optimizer steps between two entries. An entry has the loss of its last step, and the
            times and samples of all.

    Raises:
        SpecError: if ``every`` is no whole number of at least 1.
    """

    on_every_trainer: ClassVar[bool] = False

    def __init__(self, every: int = 1) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise SpecError(
                f"{type(self).__name__} got every={every!r}. Give a whole number of at least 1."
            )
        self.every = every
        self._interval = Interval()

    def write(self, interval: Interval, step: Step) -> None:
        """Write down an interval, which ends with a step."""
        raise NotImplementedError

    def close(self, record: End | Failure) -> None:
        """The fit has ended, and every interval of it is written."""
        raise NotImplementedError

    @override
    def on_step(self, step: Step) -> None:
        self._interval.add(step)
        if step.step % self.every == 0:
            self._flush()

    @override
    def on_end(self, end: End) -> None:
        self._flush()
        self.close(end)

    @override
    def on_failure(self, failure: Failure) -> None:
        self._flush()
        self.close(failure)

    def _flush(self) -> None:
        interval, self._interval = self._interval, Interval()
        if interval.last is not None:
            self.write(interval, interval.last)


def drop_cut_line(path: Path) -> None:
    """Cut off a last line that has no end: its process was killed, or the disk was full."""
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _BLOCK)
            file.seek(start)
            last = file.read(end - start).rfind(b"\n")
            end = start + last + 1
            if last >= 0:
                break
        file.truncate(end)


def scalars_of(interval: Interval, step: Step) -> Mapping[str, float]:
    """An interval as numbers by name: its last step's loss, its rates, and the step's metrics."""
    return {
        "loss": step.loss,
        "samples_per_second": interval.samples_per_second,
        "steps_per_second": interval.steps_per_second,
        "waiting": interval.waiting_share,
        **step.metrics,
    }
