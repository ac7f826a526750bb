"""Train functions of the tests of callbacks, logs and reports. Imports no test tool."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

import hybridpar as hp
from faulty import make_loop
from hybridpar import callbacks
from worlds import Batch, make_batch

SIZE = 5  # samples of a batch
STEPS = 12


def batches(rank: int, steps: int = STEPS) -> list[Batch]:
    return [make_batch(1000 * step + rank, bags=True, size=SIZE) for step in range(steps)]


class Told(callbacks.Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[object] = []
        self.losses: list[float] = []

    def on_start(self, run: callbacks.Run) -> None:
        self.records.append(run.learning_rates())
        self.records.append(run)

    def on_step(self, step: callbacks.Step) -> None:
        self.losses.append(step.loss)
        self.metrics, self.servers = step.metrics, step.servers
        self.records.append(
            (step.step, step.epoch, step.step_in_epoch, step.steps_an_epoch,
             step.samples, step.num_trainers, step.seconds, step.waiting)
        )  # fmt: skip

    def on_evaluation(self, evaluation: callbacks.Evaluation) -> None:
        self.records.append(evaluation)

    def on_checkpoint(self, checkpoint: callbacks.Saved) -> None:
        self.records.append(checkpoint)

    def on_end(self, end: callbacks.End) -> None:
        self.records.append(end)


class Scrapes(callbacks.Callback):
    """Reads what Prometheus would, after some steps."""

    on_every_trainer = False

    def __init__(self, endpoint: callbacks.Prometheus) -> None:
        self._endpoint = endpoint
        self.text, self.kind = "", ""

    def on_step(self, step: callbacks.Step) -> None:
        if step.step == 5:
            with urllib.request.urlopen(self._endpoint.url, timeout=10) as answer:
                self.text, self.kind = answer.read().decode(), answer.headers["Content-Type"]

    def on_end(self, end: callbacks.End) -> None:
        try:
            urllib.request.urlopen(self._endpoint.url, timeout=10)
        except OSError:
            self.closed = True


def everything(ctx: hp.TrainerContext, folder: str, options: dict[str, object]) -> object:
    """Train two fits with every callback that ships; what they said, and the plain result."""
    told, endpoint = Told(), callbacks.Prometheus()
    scrapes = Scrapes(endpoint)
    out = Path(folder)
    profile = options.pop("profile", False)
    loop = make_loop(
        ctx,
        callbacks=[
            told, endpoint, scrapes,  # before the monitors, whose metrics they see all the same
            callbacks.JSONL(out / "run.jsonl"), callbacks.CSV(out / "run.csv", every=5),
            callbacks.TensorBoard(out / "events", every=4),
            callbacks.LearningRateMonitor(), callbacks.StalenessMonitor(),
        ],
        report=out / "run.html",
        checkpoint=hp.Checkpoint(out / "checkpoints", every=8, wait=True),
        schedulers=lambda dense, _: [ExponentialLR(dense, 0.5)],
        **options,
    )  # fmt: skip
    first = loop.fit(batches(ctx.rank), profile=profile)
    loop._watching.evaluated(hp.Evaluation(step=ctx.step, epoch=1, results={"auc": 0.75}))
    second = loop.fit(batches(ctx.rank))
    return told, scrapes.text, scrapes.kind, getattr(scrapes, "closed", False), first, second


def plain(ctx: hp.TrainerContext) -> object:
    """The same training, unwatched: its losses, and its results."""
    losses: list[float] = []

    def loss(output: Tensor, batch: Batch) -> Tensor:
        value = F.cross_entropy(output, batch.label)
        losses.append(value.item())
        return value

    loop = make_loop(ctx, loss, schedulers=lambda dense, _: [ExponentialLR(dense, 0.5)])
    return losses, loop.fit(batches(ctx.rank)), loop.fit(batches(ctx.rank))


def told_alone(ctx: hp.TrainerContext) -> callbacks.End:
    """What one callback is told at the end."""
    told = Told()
    make_loop(ctx, callbacks=[told]).fit(batches(ctx.rank))
    return told.records[-1]


def uneven(ctx: hp.TrainerContext) -> tuple[int, int, int]:
    """The steps of a trainer, as it is told of them, and those of the job."""
    told = Told()
    result = make_loop(ctx, callbacks=[told]).fit(batches(ctx.rank, 3 + 2 * ctx.rank))
    return result.steps, told.records[-1].steps, told.records[-1].step


class Raises(callbacks.Callback):
    def __init__(self, where: str) -> None:
        self._where = where

    def on_start(self, run: callbacks.Run) -> None:
        self._raise("on_start", -1)

    def on_step(self, step: callbacks.Step) -> None:
        self._raise("on_step", step.step)
        if self._where == "measure":
            dict(step.metrics)

    def measure(self, step: callbacks.Step) -> dict[str, float]:
        self._raise("measure", step.step)
        return {}

    def on_end(self, end: callbacks.End) -> None:
        self._raise("on_end", -1)

    def _raise(self, where: str, step: int) -> None:
        if where == self._where and step in (-1, 3):
            raise ZeroDivisionError("my callback")


class Hears(callbacks.Callback):
    """Writes what it hears of a failure to a file; raises then, which must change nothing."""

    def __init__(self, folder: str, rank: int) -> None:
        self._path = Path(folder, f"heard{rank}")

    def on_failure(self, failure: callbacks.Failure) -> None:
        self._path.write_text(f"{failure.error!r} after {failure.end.steps} steps")
        raise RuntimeError("never mind")


def raising(ctx: hp.TrainerContext, where: str, folder: str) -> None:
    given = [Raises(where), Hears(folder, 0)] if ctx.rank == 0 else []
    make_loop(ctx, callbacks=given).fit(batches(ctx.rank))


def failing(ctx: hp.TrainerContext, folder: str, kills: bool) -> None:
    def loss(output: Tensor, batch: Batch) -> Tensor:
        if ctx.rank == 1 and ctx.step == 4:
            print("an unfinished line", end="", flush=True)
            if kills:
                print(", finished", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("the data are bad")
        return F.cross_entropy(output, batch.label)

    make_loop(
        ctx, loss,
        callbacks=[Hears(folder, ctx.rank), callbacks.JSONL(Path(folder, "run.jsonl"))],
        report=Path(folder, "run.html"),
    ).fit(batches(ctx.rank))  # fmt: skip


def chatter(ctx: hp.TrainerContext, own_handler: bool) -> tuple[bool, int]:
    """Print, log and draw; whether the streams were as they are without a log."""
    if own_handler:
        logging.basicConfig(format="mine: %(message)s", level=logging.INFO)
    print("hello", "world")
    print("two\nlines", file=sys.stderr)
    sys.stderr.write("\r10 %")
    sys.stderr.write("\r20 %\r")
    sys.stderr.write("\rall of it\n")
    logging.getLogger("hybridpar").info("of hybridpar")
    logging.getLogger("hybridpar").debug("in detail")
    logging.getLogger("mine").warning("of mine")
    sys.stdout.write("no end")
    return sys.stdout.isatty(), sys.stdout.fileno()


def counted(ctx: hp.TrainerContext, how: str) -> list[int]:
    """Samples of each step, by one rule or another."""
    told = Told()
    options: dict[str, Callable[[Batch], int]] = {}
    if how == "own":
        options["samples"] = lambda batch: 7 * len(batch.label)
    if how == "wrong":
        options["samples"] = lambda batch: batch.label.sum()

    def loss(output: Tensor, batch: Batch) -> Tensor:
        with torch.no_grad():
            output.sum()
        return F.cross_entropy(output, batch.label)

    make_loop(ctx, loss, callbacks=[told], accumulate=2, **options).fit(batches(ctx.rank, 5))
    return [record[4] for record in told.records if type(record) is tuple]


def shown(
    ctx: hp.TrainerContext, progress: bool | None, line_every_s: float | None, steps: int = 150
) -> None:
    """Train with a progress bar, or plain lines."""
    given = [] if line_every_s is None else [callbacks.ProgressBar(line_every_s=line_every_s)]
    make_loop(
        ctx, callbacks=given, progress=progress, consistency="bounded", staleness=2
    ).fit(batches(ctx.rank, steps), epochs=2)  # fmt: skip


def written(ctx: hp.TrainerContext, cases: list[tuple[bool | None, float | None]]) -> list[str]:
    """For each case, what it writes to standard error."""
    found = []
    for progress, line_every_s in cases:
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            shown(ctx, progress, line_every_s, steps=30)
        found.append(stderr.getvalue())
    return found


def resumed(ctx: hp.TrainerContext, folder: str) -> int:
    """Train, fail in the first attempt, and go on."""
    out = Path(folder)
    loop = make_loop(
        ctx,
        callbacks=[callbacks.JSONL(out / "run.jsonl"), callbacks.CSV(out / "run.csv")],
        checkpoint=hp.Checkpoint(out / "checkpoints", every=8, wait=True),
    )

    def data():
        for step, batch in enumerate(batches(ctx.rank)):
            if step == 11 and ctx.attempt == 0:
                raise ZeroDivisionError("the first attempt")
            yield batch

    return loop.fit(lambda _: data(), epochs=1, resume=True).steps
