"""Train functions of test_checkpoint. Imports no test tool."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hybridpar as hp
from worlds import SIZES, Batch, Model, batches_of

BATCHES = 7  # an epoch, a trainer
EPOCHS = 3
OPTIMIZERS: dict[str, hp.optim.SparseOptimizerSettings] = {
    "sgd": hp.optim.SGD(lr=0.1, momentum=0.9),
    "adam": hp.optim.Adam(lr=0.01),
    "row_wise": hp.optim.RowWiseAdagrad(lr=0.1, eps=1e-8),
}


class Dropping(Model):
    """With dropout, so that it matters where the random generator is."""

    def __init__(self, sharding: str | None = None) -> None:
        super().__init__("sum", sharding)
        self.drop = nn.Dropout(0.3)

    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor:
        both = torch.cat([embeddings[name] for name in SIZES], dim=1)
        return self.top(self.drop(both))


class Whole(NamedTuple):
    """All of a model and of what trains it."""

    step: int
    rows: dict[str, Tensor]
    state: dict[str, Tensor]
    dense: dict[str, Tensor]
    momentum: list[Tensor]
    lr: tuple[float, float]


def whole(ctx: hp.TrainerContext, loop: hp.TrainerLoop[Any]) -> Whole:
    model, dense = loop.model, loop.dense_optimizer
    assert dense is not None
    state = {}
    for spec in model.specs:
        for name in spec_states(loop, spec.name):
            state[f"{spec.name}.{name}"] = loop.sparse_optimizer.state_of(spec.name, name)
    return Whole(
        ctx.step or 0,
        {spec.name: model.rows(spec.name) for spec in model.specs if spec.module is None},
        state,
        {name: value.clone() for name, value in model.state_dict().items()},
        [s["momentum_buffer"].clone() for s in dense.state.values() if "momentum_buffer" in s],
        (dense.param_groups[0]["lr"], loop.sparse_optimizer.param_groups[0]["lr"]),
    )


def spec_states(loop: hp.TrainerLoop[Any], name: str) -> list[str]:
    spec = loop.model._connected.specs[name]
    optimizer = spec.optimizer
    if not isinstance(optimizer, hp.optim.SparseOptimizerSettings):
        return []
    return list(optimizer.state_widths(spec.embedding_dim))


def make_loop(
    ctx: hp.TrainerContext,
    checkpoint: hp.Checkpoint | None,
    *,
    optimizer: str = "adam",
    sharding: str | None = None,
    on_loss: Callable[[], None] = lambda: None,
    **options: Any,
) -> hp.TrainerLoop[Batch]:
    def loss(output: Tensor, batch: Batch) -> Tensor:
        on_loss()
        return F.cross_entropy(output, batch.label)

    torch.manual_seed(100 + ctx.rank)
    return hp.TrainerLoop(
        Dropping(sharding), ctx, loss=loss,
        dense_optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
        sparse_optimizer=OPTIMIZERS[optimizer], checkpoint=checkpoint,
        schedulers=lambda dense, sparse: [
            torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7) for optimizer in (dense, sparse)
        ], **options,
    )  # fmt: skip


def train(
    ctx: hp.TrainerContext,
    checkpoint: hp.Checkpoint | None,
    stop_at: int | None,
    resume: bool,
    options: dict[str, Any],
) -> Whole:
    """Train to the end, or until a failure at a step."""

    def on_loss() -> None:
        if ctx.step == stop_at:
            raise InterruptedError("stopped on purpose")

    loop = make_loop(ctx, checkpoint, on_loss=on_loss, **options)
    loop.fit(batches_of(ctx.rank, BATCHES, bags=True), epochs=EPOCHS, resume=resume)
    return whole(ctx, loop)


def train_and_die(
    ctx: hp.TrainerContext, checkpoint: hp.Checkpoint, deaths: tuple[int, ...]
) -> Whole:
    """Train to the end; in each attempt but the last, one trainer is killed at a step."""

    def on_loss() -> None:
        dies = ctx.attempt < len(deaths) and ctx.rank == ctx.attempt % ctx.num_trainers
        if dies and ctx.step == deaths[ctx.attempt]:
            os.kill(os.getpid(), signal.SIGKILL)

    loop = make_loop(ctx, checkpoint, on_loss=on_loss)
    loop.fit(batches_of(ctx.rank, BATCHES, bags=True), epochs=EPOCHS, resume=True)
    return whole(ctx, loop)


def load(
    ctx: hp.TrainerContext, directory: str, options: dict[str, Any], arguments: dict[str, Any]
) -> Whole:
    """Only load, into whatever layout this world has."""
    loop = make_loop(ctx, None, **options)
    loop.load(directory, **arguments)
    return whole(ctx, loop)


def each_step(ctx: hp.TrainerContext, checkpoint: hp.Checkpoint, rows: int) -> list[Tensor]:
    """Save every step of a larger table; the table as it was after each."""
    loop = hp.TrainerLoop(
        Large(rows), ctx,
        loss=lambda output, batch: output.square().mean(),
        dense_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        sparse_optimizer=hp.optim.Adagrad(lr=0.5), checkpoint=checkpoint,
    )  # fmt: skip
    seen = []

    def batches() -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(ctx.rank)
        for _ in range(6):
            yield torch.randint(rows, (20_000,), generator=draw)

    for batch in batches():
        loop.fit([batch])
        seen.append(loop.model.rows("large"))
    return seen


class Large(hp.HybridModel[Tensor]):
    def __init__(self, rows: int) -> None:
        super().__init__(
            hp.RemoteEmbeddingSpec("large", num_embeddings=rows, embedding_dim=16, seed=1)
        )
        torch.manual_seed(0)
        self.top = nn.Linear(16, 1)

    def sparse_inputs(self, batch: Tensor) -> dict[str, Tensor]:
        return {"large": batch}

    def forward(self, embeddings: dict[str, Tensor], batch: Tensor) -> Tensor:
        return self.top(embeddings["large"])


class Counting:
    """Data that tell where they are."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.next = 0
        self.asked: list[int] = []

    def __iter__(self) -> Iterator[Batch]:
        while self.next < BATCHES:
            number = self.next
            self.next += 1
            self.asked.append(number)
            yield batches_of(self.rank, number + 1, bags=True)[-1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def train_counting(
    ctx: hp.TrainerContext, checkpoint: hp.Checkpoint, stop_at: int | None
) -> tuple[Whole, list[int]]:
    def on_loss() -> None:
        if ctx.step == stop_at:
            raise InterruptedError("stopped on purpose")

    loop = make_loop(ctx, checkpoint, on_loss=on_loss)
    data = Counting(ctx.rank)
    loop.fit(data, epochs=EPOCHS, resume=True)
    return whole(ctx, loop), data.asked


def until_killed(ctx: hp.TrainerContext, checkpoint: hp.Checkpoint, mark: str) -> None:
    """Save every step until killed; resumes what is there."""
    loop = make_loop(ctx, checkpoint)
    Path(mark, str(ctx.rank)).touch()
    loop.fit(batches_of(ctx.rank, BATCHES, bags=True), epochs=10_000, resume=True)


def kill_at_random(ctx: hp.TrainerContext, checkpoint: hp.Checkpoint, seed: int) -> None:
    """Save every step; this trainer kills itself at a random moment while that happens."""
    import threading

    chance = random.Random(seed)
    loop = make_loop(ctx, checkpoint)

    def strike() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if ctx.rank == seed % ctx.num_trainers:
        threading.Timer(0.05 + chance.random() * 0.15, strike).start()
    loop.fit(batches_of(ctx.rank, BATCHES, bags=True), epochs=10_000, resume=True)


def reference_rows(ctx: hp.TrainerContext, steps: int) -> dict[int, Tensor]:
    """The item table after each step of an unbroken run."""
    loop = make_loop(ctx, None)
    found = {}
    batches = batches_of(ctx.rank, BATCHES, bags=True)
    for step in range(steps):
        loop.fit([batches[step % BATCHES]])
        found[step + 1] = loop.model.rows("item")
    return found


class Hosted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.table(ids))


class WithModule(hp.HybridModel[Tensor]):
    def __init__(self) -> None:
        super().__init__(hp.RemoteEmbeddingSpec("hosted", module=Hosted, optimizer=adam, seed=4))
        torch.manual_seed(1)
        self.top = nn.Linear(4, 1)

    def sparse_inputs(self, batch: Tensor) -> dict[str, Tensor]:
        return {"hosted": batch}

    def forward(self, embeddings: dict[str, Tensor], batch: Tensor) -> Tensor:
        return self.top(embeddings["hosted"]).squeeze(1)


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05)


def train_module(
    ctx: hp.TrainerContext, checkpoint: hp.Checkpoint, stop_at: int | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    def loss(output: Tensor, batch: Tensor) -> Tensor:
        if ctx.step == stop_at:
            raise InterruptedError("stopped on purpose")
        return output.square().mean()

    loop = hp.TrainerLoop(
        WithModule(), ctx, loss=loss,
        dense_optimizer=lambda params: torch.optim.SGD(params, lr=0.1), checkpoint=checkpoint,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(ctx.rank)
    batches = [torch.randint(11, (6,), generator=draw) for _ in range(BATCHES)]
    loop.fit(batches, epochs=2, resume=True)
    return loop.model.module_state_dict("hosted"), dict(loop.model.state_dict())


def fresh(ctx: hp.TrainerContext) -> Whole:
    return whole(ctx, make_loop(ctx, None))


def load_grown(
    ctx: hp.TrainerContext, directory: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Load into tables of more rows; theirs before and after."""

    class Grown(hp.HybridModel[Batch]):
        def __init__(self) -> None:
            super().__init__(
                *(
                    hp.RemoteEmbeddingSpec(
                        name, num_embeddings=rows + 14, embedding_dim=dim, seed=5,
                        sharding="row_wise",
                    )
                    for name, (rows, dim) in SIZES.items()
                )
            )  # fmt: skip
            self.top = nn.Linear(1, 1)

        def sparse_inputs(self, batch: Batch) -> dict[str, Any]:
            raise NotImplementedError

        def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor:
            raise NotImplementedError

    loop = hp.TrainerLoop(
        Grown(), ctx, loss=lambda output, batch: output,
        dense_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        sparse_optimizer=OPTIMIZERS["adam"],
    )  # fmt: skip
    start = {name: loop.model.rows(name) for name in SIZES}
    loop.load(directory, dense=False)
    return {name: loop.model.rows(name) for name in SIZES}, start
