"""`Watching`: tells a loop's callbacks what happens on this trainer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hybridpar.callbacks.callback import Callback
from hybridpar.callbacks.records import End, Evaluation, Failure, Profile, Saved, Step
from hybridpar.errors import CallbackError, HybridParError, describe
from hybridpar.trainer.model import HybridModel
from hybridpar.trainer.observing.told import learning_rates, run_of, steps_of
from hybridpar.trainer.observing.traffic import Traffic
from hybridpar.trainer.progress import FitResult, Progress
from hybridpar.trainer.samples import SampleCount

_logger = logging.getLogger("hybridpar")


class Watching:
    """Tells callbacks of one trainer's fits. Without a callback it does nothing.

    Args:
        callbacks: those of the loop.
        model: the loop's, connected.
        dense_optimizer: the dense half's, if it has parameters.
        samples: counts a batch's.
        accumulate: batches a step.
        settings: the loop's settings, for the record of a run.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        model: HybridModel[Any],
        dense_optimizer: torch.optim.Optimizer | None,
        samples: SampleCount,
        accumulate: int,
        settings: Mapping[str, object],
    ) -> None:
        self._tables = model._connected
        self._exchange = model._connected_exchange
        self._ctx = self._tables.ctx
        self._callbacks = [c for c in callbacks if c.on_every_trainer or self._ctx.rank == 0]
        self._rates = lambda: learning_rates(dense_optimizer, model._sparse_optimizer)
        self._samples_of = samples
        self._accumulate = accumulate
        self._settings = settings
        self._fits = False
        self._in_fit: list[Callback] = []  # those that have not heard of the fit's end
        self._traffic: Traffic | None = None
        self._epoch = 0
        self._step_in_epoch = 0
        self._steps_an_epoch: int | None = None
        self._samples = self._all_samples = self._skipped = self._steps = 0
        self._began = self._last = 0.0  # of the fit, and when the last step was done
        self._waited_before = self._waited = 0.0
        self._active = 1

    @property
    def is_on(self) -> bool:
        """Whether anybody is to be told."""
        return bool(self._callbacks)

    def counting(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The loss function; called in a step, it has the samples of its batch counted."""
        if not self.is_on:
            return loss

        def counted(output: Any, batch: Any) -> Any:
            if self._fits and torch.is_grad_enabled():  # it may evaluate, too
                self._samples += self._samples_of.of(batch, output, batch) or 0
            return loss(output, batch)

        return counted

    @contextmanager
    def fitting(self, batches: object, first_epoch: int, epochs: int) -> Iterator[None]:
        """Within it, a fit over some batches runs; its callbacks hear of its start and failure."""
        if not self.is_on:
            yield
            return
        self._traffic = self._exchange.traffic = traffic = Traffic(self._tables)
        self._steps_an_epoch = steps_of(batches, self._accumulate) or self._steps_an_epoch
        self._began = self._last = time.perf_counter()
        self._waited_before = self._waited = traffic.waited_s()
        self._samples = self._all_samples = self._skipped = self._steps = 0
        run = run_of(
            self._tables, self._settings, self._rates,
            first_epoch=first_epoch, epochs=epochs, steps_an_epoch=self._steps_an_epoch,
        )  # fmt: skip
        self._fits = True
        self._in_fit = list(self._callbacks)
        try:
            self._tell("on_start", run)
            yield
        except BaseException as error:
            self._fail(Failure(error=error, end=self._end()))
            raise
        finally:
            self._fits = False
            self._exchange.traffic = None

    def begin_epoch(self, epoch: int, batches_used: int) -> None:
        """A pass over the data begins, or its rest after so many batches."""
        if self._step_in_epoch and self._epoch != epoch:
            self._steps_an_epoch = self._step_in_epoch  # as it was last time
        self._epoch = epoch
        self._step_in_epoch = batches_used // self._accumulate
        self._active = len(self._exchange.active)

    def stepped(self, progress: Progress) -> None:
        """A step is done."""
        traffic = self._exchange.traffic
        if traffic is None or progress.latest is None:
            return
        now, waited = time.perf_counter(), traffic.waited_s()
        self._steps += 1
        self._step_in_epoch += 1
        step = Step(
            step=self._ctx.step or 0,
            epoch=self._epoch,
            step_in_epoch=self._step_in_epoch,
            steps_an_epoch=self._steps_an_epoch,
            loss_tensor=progress.latest,
            samples=self._samples,
            num_trainers=self._active,
            seconds=now - self._last,
            waiting=waited - self._waited,
            skipped=progress.skipped > self._skipped,
            staleness=self._exchange.staleness,
            time=time.time(),
            _measure=self._measure,
            _servers=traffic.so_far,
        )
        self._all_samples += self._samples
        self._samples = 0
        self._last, self._waited = now, waited
        self._skipped = progress.skipped
        self._active = len(self._exchange.active)
        self._tell("on_step", step)

    def evaluated(self, evaluation: Evaluation) -> None:
        """An evaluation is done; its time is no part of the next step's."""
        if self.is_on:
            self._tell("on_evaluation", evaluation)
            self._last = time.perf_counter()
            if self._exchange.traffic is not None:
                self._waited = self._exchange.traffic.waited_s()

    def saved(self, path: Path, step: int, num_bytes: int, seconds: float) -> None:
        """A checkpoint has become current."""
        if self.is_on:
            self._tell("on_checkpoint", Saved(path=path, step=step, num_bytes=num_bytes,
                                              seconds=seconds, time=time.time()))  # fmt: skip

    def ended(self, result: FitResult) -> None:
        """The fit is done."""
        if not self.is_on:
            return
        end = self._end(result)
        while self._in_fit:
            callback = self._in_fit.pop(0)
            with self._named(callback, "on_end"):
                callback.on_end(end)

    def _end(self, result: FitResult | None = None) -> End:
        profile = None if result is None else result.profile
        return End(
            step=self._ctx.step or 0,
            steps=self._steps,
            skipped=self._skipped,
            samples=self._all_samples,
            seconds=time.perf_counter() - self._began if result is None else result.seconds,
            waiting=self._waited - self._waited_before,
            epoch_losses=() if result is None else result.epoch_losses,
            staleness={name: dict(sorted(counts.items()))
                       for name, counts in self._exchange.staleness.items()},
            servers=() if self._traffic is None else self._traffic.so_far(),
            profile=None if profile is None else Profile(
                steps=profile.steps, seconds=profile.seconds, trainer=profile.trainer,
                all_reduce=profile.all_reduce, servers=profile.servers,
            ),
            time=time.time(),
        )  # fmt: skip

    def _tell(self, method: str, record: object) -> None:
        for callback in self._callbacks:
            with self._named(callback, method):
                getattr(callback, method)(record)

    def _fail(self, failure: Failure) -> None:
        for callback in self._in_fit:
            try:
                callback.on_failure(failure)
            except Exception:  # noqa: PERF203 - told once a fit at most
                _logger.exception("%s.on_failure raised", type(callback).__name__)

    def _measure(self, step: Step) -> dict[str, float]:
        found: dict[str, float] = {}
        for callback in self._callbacks:
            with self._named(callback, "measure"):
                found.update(callback.measure(step))
        return found

    @contextmanager
    def _named(self, callback: Callback, method: str) -> Iterator[None]:
        """An exception within it is the callback's."""
        try:
            yield
        except HybridParError:  # says itself what is wrong
            raise
        except Exception as error:
            raise CallbackError(
                f"{type(callback).__name__}.{method} raised {describe(error)} on {self._ctx.name} "
                f"(step {self._ctx.step or 0}). Mend the callback, or leave it out of "
                "TrainerLoop(callbacks=…)."
            ) from error
