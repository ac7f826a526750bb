"""Train functions that go wrong, for the tests of failures. Imports no test tool."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hybridpar as hp
from worlds import Batch, Model, collate, dense_sgd, make_batch


class TwoArgumentError(Exception):
    """Cannot be unpickled: its constructor wants two arguments."""

    def __init__(self, first: str, second: object) -> None:
        super().__init__(f"{first} and {second}")
        self.lock = second


def cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output, batch.label)


def make_loop(ctx: hp.TrainerContext, loss=cross_entropy, **options) -> hp.TrainerLoop[Batch]:
    return hp.TrainerLoop(
        Model("sum"), ctx, loss=loss,
        dense_optimizer=dense_sgd, sparse_optimizer=hp.optim.SGD(lr=0.1), **options,
    )  # fmt: skip


def train_for_ever(ctx: hp.TrainerContext, marks: str) -> None:
    """Train until killed; leave a file once some steps are done."""

    def batches():
        for step in itertools.count():
            if step == 5:
                Path(marks, f"trainer{ctx.rank}").write_text(str(os.getpid()))
            yield make_batch(step, bags=True)

    make_loop(ctx).fit(batches())


def train_with_workers_for_ever(ctx: hp.TrainerContext, marks: str) -> None:
    """The same, with batches from a DataLoader's worker processes."""
    rows = TensorDataset(torch.arange(100_000))
    sampler = DistributedSampler(rows, ctx.num_trainers, ctx.rank)
    loader = DataLoader(rows, 5, sampler=sampler, num_workers=2, collate_fn=collate)
    for step, batch in enumerate(loader):
        if step == 5:
            Path(marks, f"trainer{ctx.rank}").write_text(str(os.getpid()))
        make_loop(ctx).fit([batch]) if step == 0 else time.sleep(0.01)


def fail_at(ctx: hp.TrainerContext, rank: int, step: int, how: str) -> None:
    """One trainer fails in its loss of a step; the others only see the consequences."""

    def loss(output: Tensor, batch: Batch) -> Tensor:
        if ctx.rank == rank and ctx.step == step:
            fail(how)
        return cross_entropy(output, batch)

    make_loop(ctx, loss).fit(make_batch(step, bags=True) for step in range(1000))


def fail(how: str) -> None:
    if how == "raise":
        raise ZeroDivisionError("the data are bad")
    if how == "unpicklable":
        raise TwoArgumentError("one", (number for number in range(3)))
    if how == "chained":
        try:
            raise KeyError("the first cause")
        except KeyError as error:
            raise RuntimeError("what came of it") from error
    if how == "exit":
        sys.exit(3)
    if how == "os_exit":
        os._exit(7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def fail_before_training(ctx: hp.TrainerContext) -> None:
    if ctx.rank == 1:
        raise OSError("no such data")
    make_loop(ctx)


def bad_init(rows: Tensor) -> None:
    raise ArithmeticError(f"cannot fill {tuple(rows.shape)}")


class BadTable(Model):
    def __init__(self) -> None:
        super().__init__("sum")
        _, *rest = self.specs
        broken = hp.RemoteEmbeddingSpec(
            "item", num_embeddings=7, embedding_dim=2, mode="sum", init=bad_init
        )
        self.specs = (broken, *rest)


def server_fails(ctx: hp.TrainerContext) -> None:
    BadTable().connect(ctx, hp.optim.SGD())


def different_specs(ctx: hp.TrainerContext) -> None:
    class Other(Model):
        def __init__(self) -> None:
            super().__init__("sum" if ctx.rank == 0 else "mean")

    Other().connect(ctx, hp.optim.SGD())


def unpicklable_result(ctx: hp.TrainerContext) -> object:
    return (number for number in range(3))


def leaves_a_child(ctx: hp.TrainerContext, marks: str) -> None:
    """A trainer that forgets a process of its own."""
    child = subprocess.Popen(["sleep", "600"])
    Path(marks, f"child{ctx.rank}").write_text(str(child.pid))


def uneven_own_loop(ctx: hp.TrainerContext) -> None:
    """A loop by hand in which trainer 1 stops early: the others would wait for ever."""
    model = Model("sum")
    optimizer = model.connect(ctx, hp.optim.SGD(lr=0.1))
    for step in range(3 if ctx.rank == 1 else 6):
        batch = make_batch(step, bags=True)
        F.cross_entropy(model(model.lookup(batch), batch), batch.label).backward()
        optimizer.step()


def waits_in_vain(ctx: hp.TrainerContext) -> None:
    """Trainer 1 is busy with something else for longer than the limit."""
    model = Model("sum")
    optimizer = model.connect(ctx, hp.optim.SGD(lr=0.1))
    if ctx.rank == 1:
        time.sleep(60)
    optimizer.step()


def hold_everything(seconds: float) -> None:
    """Compute for some time without letting another Python thread run."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        pass
    sys.setswitchinterval(interval)


def slow_batch(ctx: hp.TrainerContext, seconds: float) -> int:
    """One batch takes long, and its computation holds the interpreter."""

    def loss(output: Tensor, batch: Batch) -> Tensor:
        if ctx.rank == 1 and ctx.step == 2:
            hold_everything(seconds)
        return cross_entropy(output, batch)

    return make_loop(ctx, loss).fit(make_batch(step, bags=True) for step in range(4)).steps


def stop_in_step(ctx: hp.TrainerContext, rank: int, step: int) -> None:
    """One trainer is stopped, as if by hand."""

    def loss(output: Tensor, batch: Batch) -> Tensor:
        if ctx.rank == rank and ctx.step == step:
            os.kill(os.getpid(), signal.SIGSTOP)
        return cross_entropy(output, batch)

    make_loop(ctx, loss).fit(make_batch(number, bags=True) for number in range(1000))


def wait_at(ctx: hp.TrainerContext, marks: str) -> None:
    """Trainer 1 sits in a function of its own at step 3 until killed; the other waits for it."""

    def asleep_in_the_loss() -> None:
        Path(marks, "asleep").touch()
        time.sleep(600)

    def loss(output: Tensor, batch: Batch) -> Tensor:
        if ctx.rank == 1 and ctx.step == 3:
            asleep_in_the_loss()
        return cross_entropy(output, batch)

    make_loop(ctx, loss).fit(make_batch(step, bags=True) for step in range(1000))


def fail_until(ctx: hp.TrainerContext, attempt: int, marks: str) -> tuple[int, float]:
    """Fail in step 5 of every attempt before a given one, each role in turn."""

    def loss(output: Tensor, batch: Batch) -> Tensor:
        if ctx.attempt < attempt and ctx.rank == 1 and ctx.step == 5:
            Path(marks, f"attempt{ctx.attempt}").touch()
            fail(["raise", "kill"][ctx.attempt % 2])
        return cross_entropy(output, batch)

    result = make_loop(ctx, loss).fit(make_batch(step, bags=True) for step in range(10))
    return ctx.attempt, result.last_loss
