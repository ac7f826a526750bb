"""`ProgressBar`: how far a fit is, on the terminal."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import time
from typing import Any, ClassVar

from typing_extensions import override

from hybridpar.callbacks.callback import Callback
from hybridpar.callbacks.logger import Interval
from hybridpar.callbacks.records import End, Evaluation, Failure, Run, Step
from hybridpar.errors import SpecError

_REFRESH_S = 0.25  # of the bar: each refresh looks at the loss
_LEAST_LINES_S = 0.01
# The bar is short, so that there is room for the figures; a narrow terminal cuts the last ones off.
_FORMAT = (
    "{desc}: {percentage:3.0f}%|{bar:10}| {n}/{total} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
)
_UNKNOWN_WIDTH = 100  # columns of a terminal that does not tell, such as a container's


class ProgressBar(Callback):
    """One bar over all epochs and steps of a fit, written by trainer 0 to its standard error.

    Beside the bar: loss, samples a second of the job, steps a second, time left, the share of the
    time in which trainer 0 waited for servers, the mean staleness if any row was stale, and the
    newest evaluation. Where standard error is no terminal, or tqdm is not installed, plain lines
    with the same.

    Args:
        line_every_s: seconds between two plain lines.
        needs_tqdm: whether it is an error if tqdm is missing on a terminal.

    Raises:
        SpecError: if it is.
    """

    on_every_trainer: ClassVar[bool] = False

    def __init__(self, *, line_every_s: float = 10.0, needs_tqdm: bool = False) -> None:
        terminal = sys.stderr.isatty()
        has_tqdm = importlib.util.find_spec("tqdm") is not None
        if terminal and needs_tqdm and not has_tqdm:
            raise SpecError(
                "The progress bar needs tqdm. Install it: pip install 'hybridpar[progress]'; or "
                "leave out progress=True for plain lines."
            )
        if not (isinstance(line_every_s, (int, float)) and line_every_s >= _LEAST_LINES_S):
            raise SpecError(f"ProgressBar got line_every_s={line_every_s!r}. Give seconds above 0.")
        self._results = ""
        self._draws = terminal and has_tqdm
        self._every_s = _REFRESH_S if self._draws else float(line_every_s)
        self._bar: Any = None  # a tqdm
        self._run = Run(rank=0, num_trainers=1, num_servers=0)
        self._interval = Interval()
        self._all = Interval()
        self._began = self._shown = 0.0
        self._before = 0  # steps of the first epoch that were done before the fit
        self._stale: dict[str, dict[int, int]] = {}

    @override
    def on_start(self, run: Run) -> None:
        self._run = run
        self._interval, self._all = Interval(), Interval()
        self._before = 0
        self._began = self._shown = time.monotonic()
        self._results = ""
        if self._draws and run.epochs:
            self._bar = _new_bar(self._total(run.steps_an_epoch), self._epoch(run.first_epoch))

    @override
    def on_step(self, step: Step) -> None:
        if not self._all.steps:
            self._before = step.step_in_epoch - 1
        self._interval.add(step)
        self._all.add(step)
        now = time.monotonic()
        if now - self._shown >= self._every_s:
            self._shown = now
            self._show(step)

    @override
    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._results = ", ".join(f"{k} {v:.4g}" for k, v in evaluation.results.items())
        if not self._draws:
            last = self._all.last  # an evaluation at the end of an epoch counts that one as done
            epoch = self._run.first_epoch if last is None else last.epoch
            self._print(f"{self._epoch(epoch)}, step {evaluation.step}: {self._results}")

    @override
    def on_end(self, end: End) -> None:
        last = self._all.last
        if last is not None:
            self._interval = self._all  # of the whole fit
            self._show(last)
        self._close()

    @override
    def on_failure(self, failure: Failure) -> None:
        self._close()

    def _show(self, step: Step) -> None:
        if self._bar is not None:
            self._bar.set_description_str(self._epoch(step.epoch), refresh=False)
            self._bar.set_postfix_str(", ".join(self._figures(step)), refresh=False)
            all_steps = self._total(step.steps_an_epoch)
            if all_steps is not None:
                self._bar.total = max(all_steps, self._all.steps)
                self._bar.bar_format = _FORMAT
            self._bar.n = self._all.steps
            self._bar.refresh()
        elif not self._draws:
            figures = self._figures(step)
            figures.insert(2, f"{self._interval.steps_per_second:.3g} steps/s")
            left = self._left_s(step)
            figures += [] if left is None else [f"{_clock(left)} left"]
            total = "" if step.steps_an_epoch is None else f" of {step.steps_an_epoch}"
            where = f"{self._epoch(step.epoch)}, step {step.step_in_epoch}{total}"
            self._print(f"{where}: {', '.join(figures)}")
        self._interval = Interval()

    def _figures(self, step: Step) -> list[str]:
        found = [
            f"loss {step.loss:.4g}",
            f"{self._interval.samples_per_second:,.0f} samples/s",
            f"{self._interval.waiting_share:.0%} waiting",
        ]
        lookups = total = 0
        for table, counts in step.staleness.items():
            before = self._stale.get(table, {})
            lookups += sum(counts.values()) - sum(before.values())
            total += sum(behind * n for behind, n in counts.items())
            total -= sum(behind * n for behind, n in before.items())
            self._stale[table] = dict(counts)
        if total:
            found.append(f"staleness {total / lookups:.2g}")
        return found + ([self._results] if self._results and self._draws else [])

    def _left_s(self, step: Step) -> float | None:
        """Evaluations and checkpoints to come are taken to be as frequent as they were."""
        total, done = self._total(step.steps_an_epoch), self._all.steps
        elapsed = time.monotonic() - self._began
        return None if total is None else max(0, total - done) * elapsed / done

    def _total(self, steps_an_epoch: int | None) -> int | None:
        """Steps of the fit, as far as the length of an epoch tells."""
        if steps_an_epoch is None:
            return None
        return steps_an_epoch * self._run.epochs - self._before

    def _epoch(self, epoch: int) -> str:
        return f"epoch {epoch + 1}/{self._run.first_epoch + self._run.epochs}"

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - what was asked for

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _new_bar(total: int | None, epoch: str) -> Any:
    """A bar that needs no thread of its own, and no lock that other processes see."""
    plain: Any = importlib.import_module("tqdm").tqdm

    class Bar(plain):  # type: ignore[misc]
        monitor_interval = 0

    Bar.set_lock(threading.RLock())
    width = None if os.get_terminal_size(sys.stderr.fileno()).columns else _UNKNOWN_WIDTH
    return Bar(
        total=total, desc=epoch, unit=" steps", bar_format=_FORMAT if total else None,
        ncols=width, dynamic_ncols=width is None, mininterval=0, file=sys.stderr,
    )  # fmt: skip


def _clock(seconds: float) -> str:
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"
