"""Train functions of test_evaluation that stop early. Imports no test tool."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

import hybridpar as hp
from evaluated import ALL, class_0, hosting_loop
from hybridpar.metrics import LogLoss, Metric
from saved import make_loop, whole
from worlds import batches_of

SCRIPT = [9.0, 5.0, 4.0, 4.5, 3.0, 3.0, 3.5, 1.0]  # by evaluation, one every two steps


class Scripted(Metric):
    """What is written for a step."""

    def __init__(self, ctx: hp.TrainerContext, *, bad: bool = False) -> None:
        self._ctx = ctx
        self._bad = bad
        super().__init__()

    def reset(self) -> None:
        pass

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        pass

    def compute(self) -> float:
        return 10.0 if self._bad else SCRIPT[(self._ctx.step or 0) // 2]


class Stopped(NamedTuple):
    steps: int
    evaluated: list[int]
    early: bool
    whole: Any


def stop_early(
    ctx: hp.TrainerContext,
    directory: str,
    fails_at: int | None = None,
    resume: bool = False,
    options: dict[str, Any] | None = None,
    then_fit: bool = False,
    bad: bool = False,
) -> Stopped:
    """The script's best is at step 8; two that are no better, and training ends at step 12."""

    def on_loss() -> None:
        if ctx.step == fails_at:
            raise InterruptedError("stopped on purpose")

    settings = hp.EarlyStopping(monitor="scripted", patience=2, **(options or {}))
    checkpoint = hp.Checkpoint(directory, every=3, every_full=2, wait=True)
    loop = make_loop(ctx, checkpoint, on_loss=on_loss)
    result = loop.fit(
        batches_of(ctx.rank, 7, bags=True), epochs=3, resume=resume, eval_every=2,
        eval_batches=lambda: ALL[ctx.rank :: 3], metrics={"scripted": Scripted(ctx, bad=bad)},
        inputs=class_0, early_stopping=settings,
    )  # fmt: skip
    everything = whole(ctx, loop)
    if then_fit:
        assert loop.fit(batches_of(ctx.rank, 4, bags=True)).steps == 4
    return Stopped(
        result.steps, [each.step for each in result.evaluations], result.stopped_early, everything
    )


def first_steps(ctx: hp.TrainerContext, steps: int) -> Any:
    """All there is after so many steps, in passes of seven."""
    loop = make_loop(ctx, None)
    batches = batches_of(ctx.rank, 7, bags=True)
    while steps:
        loop.fit(batches[:steps])
        steps -= min(7, steps)
    return whole(ctx, loop)


def stop_and_go_on(ctx: hp.TrainerContext) -> list[tuple[int, bool, int]]:
    """Stop within a pass, on arrival and with hosted modules; then train on."""
    found = []
    for loop in (make_loop(ctx, None, consistency="async"), hosting_loop(ctx, norm=False)):
        ctx.step = 0
        result = loop.fit(
            batches_of(ctx.rank, 7, bags=True), eval_batches=ALL, eval_every=2,
            metrics={"log_loss": LogLoss()}, inputs=class_0,
            early_stopping=hp.EarlyStopping(mode="max", min_delta=1e6, patience=1),
        )  # fmt: skip
        more = loop.fit(batches_of(ctx.rank, 7, bags=True)).steps
        found.append((result.steps, result.stopped_early, more))
    return found
