"""Steps with a loss or gradient that is not finite, and the plain run that leaves them out.

Imports no test tool.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hybridpar as hp
from scenarios import DIM, LR, ROWS, SEED, STEPS, bags, head, ids, loss_of

Bad = dict[tuple[int, int], str]
"""By rank and step, what is not finite: ``"loss"``, ``"table"``, ``"dense"`` or ``"all"``."""


class Batch(NamedTuple):
    """Ids for tables "a" and "b"; a step number; what goes wrong in it, if anything."""

    a: tuple[Tensor, Tensor]
    b: Tensor
    step: int
    bad: str = ""


def batches(rank: int, count: int, bad: Bad) -> list[Batch]:
    made = []
    for step in range(count):
        generator = torch.Generator().manual_seed(100 * step + rank)
        made.append(Batch(bags(generator), ids(generator, 7), step, bad.get((rank, step), "")))
    return made


def spoilt(value: Tensor, number: float) -> Tensor:
    """The value itself, whose gradient has a number that is not finite."""
    value = value.clone()
    value.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), number))
    return value


def loss_on(top: nn.Module, a: Tensor, b: Tensor, batch: Batch) -> Tensor:
    if batch.bad == "table":
        b = spoilt(b, float("inf"))
    loss = loss_of(top, a) + loss_of(top, b)
    if batch.bad == "dense":
        loss = loss + spoilt(top.weight, float("-inf")).sum() * 0.0
    if batch.bad == "all":  # a finite loss, whose gradients are not
        loss = loss + (a.sum() + b.sum() + top.weight.sum()).mul(0.0).sqrt()
    return loss * float("nan") if batch.bad == "loss" else loss


class Model(hp.HybridModel[Batch]):
    def __init__(self, **more: Any) -> None:
        sizes: dict[str, Any] = {"num_embeddings": ROWS, "embedding_dim": DIM, "seed": SEED}
        super().__init__(
            hp.RemoteEmbeddingSpec("a", mode="sum", sharding="row_wise", **sizes, **more),
            hp.RemoteEmbeddingSpec("b", **sizes, **more),
        )
        self.top = head()

    def sparse_inputs(self, batch: Batch) -> dict[str, Any]:
        return {"a": batch.a, "b": batch.b}

    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor:
        return loss_on(self.top, embeddings["a"], embeddings["b"], batch)


class NoTable(hp.HybridModel[Batch]):
    def __init__(self) -> None:
        super().__init__()
        plain = Plain()
        self.a, self.b, self.top = plain.a, plain.b, plain.top

    def sparse_inputs(self, batch: Batch) -> dict[str, Any]:
        return {}

    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor:
        return loss_on(self.top, self.a(*batch.a), self.b(batch.b), batch)


class NoDense(hp.HybridModel[Batch]):
    """Adds its rows up, so that a table counts its updates."""

    def __init__(self) -> None:
        super().__init__(
            hp.RemoteEmbeddingSpec(
                "b", num_embeddings=ROWS, embedding_dim=2, init=nn.init.zeros_, sharding="row_wise"
            )
        )

    def sparse_inputs(self, batch: Batch) -> dict[str, Any]:
        return {"b": batch.b}

    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor:
        rows = embeddings["b"]
        rows = spoilt(rows, float("nan")) if batch.bad == "table" else rows
        return rows.sum() * (float("inf") if batch.bad == "loss" else 1.0)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.a = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        torch.manual_seed(SEED)
        self.b = nn.Embedding(ROWS, DIM)
        self.top = head()


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)  # its bias correction counts steps


def schedules(dense: torch.optim.Optimizer | None, sparse: torch.optim.Optimizer) -> list[Any]:
    optimizers = [sparse] if dense is None else [dense, sparse]
    return [torch.optim.lr_scheduler.ExponentialLR(each, gamma=0.8) for each in optimizers]


class Outcome(NamedTuple):
    rows: dict[str, Tensor]
    dense: dict[str, Tensor]
    result: hp.FitResult
    lrs: list[float]


def as_it_is(output: Tensor, batch: Any) -> Tensor:
    return output


def fit(
    ctx: hp.TrainerContext,
    bad: Bad,
    counts: list[int] | None = None,
    kind: str = "both",
    options: dict[str, Any] | None = None,
    epochs: int = 1,
) -> Outcome:
    """Train over batches some of which are bad, schedulers and all."""
    models = {"both": Model, "no table": NoTable, "no dense": NoDense}
    model = models[kind]()
    given: dict[str, Any] = {
        "sparse_optimizer": hp.optim.SGD(lr=LR, momentum=0.0),
        "schedulers": schedules,
        "non_finite": "skip",
    }
    loop = hp.TrainerLoop(
        model, ctx, loss=as_it_is, dense_optimizer=adam, **given | (options or {})
    )
    count = (counts or [STEPS] * ctx.num_trainers)[ctx.rank]
    result = loop.fit(batches(ctx.rank, count, bad), epochs=epochs)
    if given | (options or {}) != given:  # updates on arrival: until all have arrived
        torch.distributed.barrier()
    rows = {each.name: model.rows(each.name) for each in model.specs}
    dense = {name: value.detach().clone() for name, value in model.state_dict().items()}
    lrs = [group["lr"] for group in loop.sparse_optimizer.param_groups]
    return Outcome(rows, dense, result, lrs)


def fit_many(ctx: hp.TrainerContext, runs: list[dict[str, Any]]) -> list[Outcome]:
    """Several of them in one world."""
    return [fit(ctx, **run) for run in runs]


def leave_out(
    trainers: int,
    bad: Bad,
    counts: list[int] | None = None,
    kind: str = "both",
    accumulate: int = 1,
    epochs: int = 1,
) -> Plain:
    """One process on all trainers' batches, without the steps that any of them has a bad one in."""
    model = Plain()
    weights = [model.a.weight, model.b.weight]
    tables = adam(weights) if kind == "no table" else torch.optim.SGD(weights, lr=LR)
    dense = adam(list(model.top.parameters()))
    schedulers = schedules(dense, tables)
    counts = counts or [STEPS] * trainers
    data = [batches(rank, count, bad) for rank, count in enumerate(counts)]
    for _, start in itertools.product(range(epochs), range(0, max(counts), accumulate)):
        groups = [own[start : start + accumulate] for own in data if start < len(own)]
        tables.zero_grad()
        dense.zero_grad()
        if not any(batch.bad for group in groups for batch in group):
            for group in groups:
                for batch in group:
                    loss = loss_on(model.top, model.a(*batch.a), model.b(batch.b), batch)
                    (loss / len(group) / len(groups)).backward()
            tables.step()
            dense.step()
        tables._opt_called = dense._opt_called = True  # else schedulers warn
        for scheduler in schedulers:
            scheduler.step()
    return model


class HalfFinite(Model):
    """A sum that overflows, of gradients that are finite."""

    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor:
        a = embeddings["a"].clone()
        a.register_hook(lambda grad: torch.full_like(grad, 3e38))
        return super().forward(embeddings | {"a": a}, batch)


def large_but_finite(ctx: hp.TrainerContext) -> int:
    loop = hp.TrainerLoop(
        HalfFinite(), ctx, loss=as_it_is, dense_optimizer=adam,
        sparse_optimizer=hp.optim.SGD(lr=1e-38),
    )  # fmt: skip
    return loop.fit(batches(ctx.rank, 2, {})).steps
