"""Users' modules that servers host, and how they are trained. Imports no test tool."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hybridpar as hp
from scenarios import DIM, LR, ROWS, SEED, STEPS, bags, dense_sgd, head, ids, loss_of


class QuotientRemainder(nn.Module):
    """Two small tables stand for a large one: Shi et al., "Compositional Embeddings", KDD 2020."""

    def __init__(self, num_embeddings: int, embedding_dim: int, num_buckets: int) -> None:
        super().__init__()
        self.quotient = nn.Embedding(-(-num_embeddings // num_buckets), embedding_dim)
        self.remainder = nn.Embedding(num_buckets, embedding_dim)
        self.num_buckets = num_buckets

    def forward(self, ids: Tensor) -> Tensor:
        quotient = self.quotient(ids.div(self.num_buckets, rounding_mode="floor"))
        return quotient * self.remainder(ids % self.num_buckets)


class Tower(nn.Module):
    """A small MLP that drops out while it trains."""

    def __init__(self, in_features: int, *, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(in_features, 6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, DIM)
        )

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)


class Batch(NamedTuple):
    bags: tuple[Tensor, Tensor]
    ids: Tensor
    features: Tensor
    step: int


def batches(rank: int) -> list[Batch]:
    made = []
    for step in range(STEPS):
        g = torch.Generator().manual_seed(100 * step + rank)
        made.append(Batch(bags(g), ids(g, 7), torch.randn(7, 5, generator=g), step))
    return made


class Hosting(hp.HybridModel[Batch]):
    """Three hosted modules beside a table."""

    def __init__(self, dropout: float = 0.0) -> None:
        hosted: dict[str, Any] = {"seed": SEED, "optimizer": torch.optim.Adam}
        super().__init__(
            hp.RemoteEmbeddingSpec(
                "bag", module=nn.EmbeddingBag, args=(ROWS, DIM), kwargs={"mode": "sum"}, **hosted
            ),
            hp.RemoteEmbeddingSpec("qr", module=QuotientRemainder, args=(ROWS, DIM, 5), **hosted),
            hp.RemoteEmbeddingSpec(
                "tower", module=Tower, args=(5,), kwargs={"dropout": dropout}, **hosted
            ),
            hp.RemoteEmbeddingSpec("table", num_embeddings=ROWS, embedding_dim=DIM, seed=SEED),
        )
        self.top = head()

    def sparse_inputs(self, batch: Batch) -> dict[str, Any]:
        return {
            "bag": batch.bags,
            "qr": batch.ids,
            "tower": batch.features,
            "table": batch.ids,
        }

    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor:
        return total_of(self.top, embeddings, batch)


def total_of(top: nn.Linear, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
    """In odd steps the loss ignores the tower."""
    used = [name for name in outputs if name != "tower" or batch.step % 2 == 0]
    return sum(loss_of(top, outputs[name]) for name in sorted(used))


class Outcome(NamedTuple):
    states: dict[str, dict[str, Tensor]]
    rows: Tensor
    top: Tensor


def collect(model: Hosting) -> Outcome:
    states = {name: model.module_state_dict(name) for name in ("bag", "qr", "tower")}
    return Outcome(states, model.rows("table"), model.top.weight.detach().clone())


def as_it_is(output: Tensor, batch: Batch) -> Tensor:
    return output


def train(ctx: hp.TrainerContext, by_hand: bool, consistency: str) -> Outcome:
    model = Hosting()
    settings = hp.optim.SGD(lr=LR)
    if not by_hand:
        loop = hp.TrainerLoop(
            model, ctx, loss=as_it_is, dense_optimizer=dense_sgd, sparse_optimizer=settings,
            consistency=consistency,
        )  # fmt: skip
        loop.fit(batches(ctx.rank))
        return collect(model)
    optimizer = model.connect(ctx, settings)
    groups = [(group["tables"], group["lr"]) for group in optimizer.param_groups]
    assert groups == [(("table",), LR), (("bag",), 1e-3), (("qr",), 1e-3), (("tower",), 1e-3)]
    dense = nn.parallel.DistributedDataParallel(model)
    top = dense_sgd(list(model.parameters()))
    for batch in batches(ctx.rank):
        loss = dense(model.lookup(batch), batch)
        top.zero_grad()
        loss.backward()
        top.step()
        optimizer.step()
    return collect(model)


def train_plain(trainers: int) -> Outcome:
    modules = {}
    builders = {
        "bag": lambda: nn.EmbeddingBag(ROWS, DIM, mode="sum"),
        "qr": lambda: QuotientRemainder(ROWS, DIM, 5),
        "tower": lambda: Tower(5, dropout=0.0),
        "table": lambda: nn.Embedding(ROWS, DIM),
    }
    for name, build in builders.items():
        torch.manual_seed(SEED)
        modules[name] = build()
    top = head()
    optimizers = [torch.optim.Adam(modules[name].parameters()) for name in ("bag", "qr", "tower")]
    optimizers.append(torch.optim.SGD([*modules["table"].parameters(), *top.parameters()], lr=LR))
    data = [batches(rank) for rank in range(trainers)]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for own in data:
            batch = own[step]
            outputs = {
                "bag": modules["bag"](*batch.bags),
                "qr": modules["qr"](batch.ids),
                "tower": modules["tower"](batch.features),
                "table": modules["table"](batch.ids),
            }
            (total_of(top, outputs, batch) / trainers).backward()
        for optimizer in optimizers:
            optimizer.step()
    states = {name: dict(modules[name].state_dict()) for name in ("bag", "qr", "tower")}
    return Outcome(states, modules["table"].weight.detach(), top.weight.detach())


def modes(ctx: hp.TrainerContext) -> tuple[bool, bool, bool]:
    """Dropout: whether two lookups agree in training mode, in eval mode, and once frozen."""
    model = Hosting(dropout=0.5)
    model.connect(ctx, hp.optim.SGD())
    (batch, *_) = batches(0)

    def agree() -> bool:
        first, second = (model.lookup(batch)["tower"] for _ in range(2))
        return torch.equal(first, second)

    training = agree()
    model.eval()
    evaluating = agree()
    model.freeze("tower")
    return training, evaluating, model.lookup(batch)["tower"].requires_grad


def schedule(ctx: hp.TrainerContext) -> tuple[Tensor, Tensor]:
    """Two steps of a module, the second at a learning rate that a scheduler made zero."""
    model = Hosting()
    optimizer = model.connect(ctx, hp.optim.SGD(lr=LR))
    stop = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0))
    seen = []
    for batch in batches(ctx.rank)[:2]:
        model(model.lookup(batch), batch).backward()
        optimizer.step()
        stop.step()
        seen.append(model.module_state_dict("qr")["remainder.weight"])
    return seen[0], seen[1]


def not_a_module(*args: Any) -> str:
    return "no module"


def no_optimizer(parameters: Any) -> str:
    return "no optimizer"


def returns_a_pair() -> nn.Module:
    return nn.LSTM(5, DIM)


class One(hp.HybridModel[Any]):
    def __init__(self, **options: Any) -> None:
        given = {"module": nn.Linear, "args": (5, DIM), "optimizer": torch.optim.SGD}
        super().__init__(hp.RemoteEmbeddingSpec("m", **given | options))

    def sparse_inputs(self, batch: Any) -> dict[str, Any]:
        return {"m": batch}

    def forward(self, embeddings: dict[str, Tensor], batch: Any) -> Tensor:
        return embeddings["m"].sum()


def use_one(ctx: hp.TrainerContext, options: dict[str, Any], value: Any) -> None:
    model = One(**options)
    model.connect(ctx)
    model.lookup(value)


def learned_input(ctx: hp.TrainerContext) -> None:
    use_one(ctx, {}, torch.ones(2, 5, requires_grad=True))
