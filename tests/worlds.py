"""Models and train functions that the tests run in real processes. Imports no test tool."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hybridpar as hp

ITEMS, USERS, WORDS = 37, 23, 11
DIM, USER_DIM = 8, 4
LABELS = 3
SIZES = {"item": (ITEMS, DIM), "user": (USERS, USER_DIM), "word": (WORDS, DIM)}
SEEDS = {"item": 11, "user": 12, "word": 13}


class Batch(NamedTuple):
    """B samples: items in bags or one each, one user, two words, a label."""

    items: Tensor
    offsets: Tensor | None
    users: Tensor
    words: Tensor
    label: Tensor


def make_batch(seed: int, *, bags: bool, size: int = 5) -> Batch:
    """A batch in which ids repeat, and, with bags, one bag is empty."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    lengths = draw(4, size)
    lengths[seed % size] = 0
    offsets = lengths.cumsum(0) - lengths
    return Batch(
        items=draw(ITEMS, int(lengths.sum())) if bags else draw(ITEMS, size),
        offsets=offsets if bags else None,
        users=draw(USERS // 2, size).int(),
        words=draw(WORDS, size, 2),
        label=draw(LABELS, size),
    )


def collate(rows: list[tuple[Tensor]]) -> Batch:
    """A batch made up from dataset rows, each a number; for DataLoaders."""
    return make_batch(int(sum(row[0] for row in rows)), bags=True)


class Model(hp.HybridModel[Batch]):
    def __init__(self, mode: str | None, sharding: str | None = None) -> None:
        modes: dict[str, Any] = {"item": mode, "user": None, "word": "mean"}
        super().__init__(
            *(
                hp.RemoteEmbeddingSpec(
                    name,
                    num_embeddings=rows,
                    embedding_dim=dim,
                    mode=modes[name],
                    sharding=sharding,  # type: ignore[arg-type]
                    seed=SEEDS[name],
                )
                for name, (rows, dim) in SIZES.items()
            )
        )
        torch.manual_seed(5)
        self.top = nn.Linear(DIM + USER_DIM + DIM, LABELS)

    def sparse_inputs(self, batch: Batch) -> dict[str, Any]:
        items = batch.items if batch.offsets is None else (batch.items, batch.offsets)
        return {"item": items, "user": batch.users, "word": batch.words}

    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor:
        return self.top(torch.cat([embeddings[name] for name in SIZES], dim=1))


class Case(NamedTuple):
    sharding: str
    optimizer: str
    mode: str | None

    def settings(self) -> hp.optim.SparseOptimizerSettings:
        return SETTINGS[self.optimizer]


SETTINGS: dict[str, hp.optim.SparseOptimizerSettings] = {
    "SGD": hp.optim.SGD(lr=0.1),
    "Adagrad": hp.optim.Adagrad(lr=0.1, eps=1e-8, initial_accumulator_value=0.1),
    "RowWiseAdagrad": hp.optim.RowWiseAdagrad(lr=0.1, eps=1e-8, initial_accumulator_value=0.1),
}
CASES = [
    Case(*case)
    for case in itertools.product(
        ("table_wise", "row_wise", "column_wise"), SETTINGS, ("sum", "mean", None)
    )
    if case[:2] != ("column_wise", "RowWiseAdagrad")  # refused: it looks at whole rows
]


class Trained(NamedTuple):
    """What a run ends with: this trainer's losses, and the whole model."""

    losses: list[float]
    rows: dict[str, Tensor]
    state: dict[str, Tensor]
    dense: dict[str, Tensor]


def collect(
    model: hp.HybridModel[Batch], optimizer: hp.SparseOptimizer, losses: list[float], state: bool
) -> Trained:
    return Trained(
        losses,
        {name: model.rows(name) for name in SIZES},
        {name: optimizer.state_of(name, "sum") for name in SIZES} if state else {},
        {name: value.clone() for name, value in model.state_dict().items()},
    )


def batches_of(rank: int, steps: int, *, bags: bool) -> list[Batch]:
    return [make_batch(1000 * step + rank, bags=bags) for step in range(steps)]


def dense_sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.5)


def run_loop(ctx: hp.TrainerContext, case: Case, steps: list[int], epochs: int = 1) -> Trained:
    """Train with TrainerLoop; ``steps`` says how many batches each rank has an epoch."""
    losses: list[float] = []

    def loss(output: Tensor, batch: Batch) -> Tensor:
        value = F.cross_entropy(output, batch.label)
        losses.append(value.item())
        return value

    model = Model(case.mode, case.sharding)
    loop = hp.TrainerLoop(
        model, ctx, loss=loss, dense_optimizer=dense_sgd, sparse_optimizer=case.settings(),
        average_by="ddp" if CASES.index(case) % 2 else "servers",
    )  # fmt: skip
    batches = batches_of(ctx.rank, steps[ctx.rank], bags=case.mode is not None)
    result = loop.fit(batches, epochs=epochs)
    assert result.steps == len(losses) == steps[ctx.rank] * epochs
    return collect(model, loop.sparse_optimizer, losses, state=case.optimizer != "SGD")


def all_cases(ctx: hp.TrainerContext, steps: int) -> list[Trained]:
    """Every case one after another, in one world: a model each."""
    return [run_loop(ctx, case, [steps] * ctx.num_trainers) for case in CASES]


def own_loop(ctx: hp.TrainerContext, case: Case, steps: int) -> Trained:
    """The same pieces driven by hand."""
    model = Model(case.mode, case.sharding)
    sparse_optimizer = model.connect(ctx, case.settings())
    dense = nn.parallel.DistributedDataParallel(model) if ctx.num_trainers > 1 else model
    dense_optimizer = dense_sgd(list(model.parameters()))
    losses = []
    for batch in batches_of(ctx.rank, steps, bags=case.mode is not None):
        loss = F.cross_entropy(dense(model.lookup(batch), batch), batch.label)
        dense_optimizer.zero_grad()
        sparse_optimizer.zero_grad()
        loss.backward()
        dense_optimizer.step()
        sparse_optimizer.step()
        losses.append(loss.item())
    return collect(model, sparse_optimizer, losses, state=case.optimizer != "SGD")
