"""Train functions of test_averaging. Imports no test tool."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hybridpar as hp

DIM = 4


class Batch(NamedTuple):
    ids: Tensor
    values: Tensor
    label: Tensor
    branch: int


def batches(rank: int, count: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(rank)
    return [
        Batch(
            torch.randint(30, (6, 3), generator=draw),
            torch.randn(6, DIM, generator=draw),
            torch.rand(6, generator=draw),
            (rank + step) % 2,
        )
        for step in range(count)
    ]


class Stop(torch.autograd.Function):
    """Lets no gradient through, which is another thing than a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class Model(hp.HybridModel[Batch]):
    """A dense half with buffers, and two branches of which a batch takes one if asked to."""

    def __init__(self, *, branches: bool, stops: bool = False) -> None:
        super().__init__(hp.RemoteEmbeddingSpec("t", num_embeddings=30, embedding_dim=DIM, seed=1))
        torch.manual_seed(3)
        self.norm = nn.BatchNorm1d(DIM)
        self.branches = nn.ModuleList(nn.Linear(DIM, 1) for _ in range(2))
        self.never = nn.Linear(DIM, 1) if branches else None
        self.some = branches
        self.stopped = nn.Linear(DIM, 1) if stops else None

    def sparse_inputs(self, batch: Batch) -> dict[str, Tensor]:
        return {"t": batch.ids}

    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor:
        mixed = self.norm(embeddings["t"].sum(1) + batch.values)
        chosen = [self.branches[batch.branch]] if self.some else self.branches
        output = sum(branch(mixed) for branch in chosen).squeeze(1)
        if self.stopped is not None:
            output = output + Stop.apply(self.stopped(batch.values)).squeeze(1)
        return output


class Outcome(NamedTuple):
    rows: Tensor
    dense: dict[str, Tensor]
    unused: bool


def train(ctx: hp.TrainerContext, counts: list[int], options: dict[str, Any]) -> Outcome:
    options = dict(options)
    branches = "find_unused_parameters" in options.get("ddp", {})
    model = Model(branches=branches, stops=bool(options.pop("stops", False)))
    loop = hp.TrainerLoop(
        model, ctx,
        loss=lambda output, batch: nn.functional.mse_loss(output, batch.label),
        dense_optimizer=lambda params: torch.optim.Adam(params, lr=0.05, weight_decay=0.1),
        **{"sparse_optimizer": hp.optim.SGD(lr=0.1)} | options,
    )  # fmt: skip
    assert (loop._steps.averaging is None) == (options.get("average_by") == "ddp")
    loop.fit(batches(ctx.rank, counts[ctx.rank]), epochs=2)
    dense = {name: value.clone() for name, value in model.state_dict().items()}
    unused = model.never is not None and model.never.weight.grad is None
    return Outcome(model.rows("t"), dense, unused)


def both(
    ctx: hp.TrainerContext, counts: list[int], options: dict[str, Any]
) -> tuple[Outcome, Outcome]:
    """Averaged by DDP, and by a server."""
    return tuple(train(ctx, counts, options | {"average_by": by}) for by in ("ddp", "servers"))


def chosen(ctx: hp.TrainerContext, width: int, options: dict[str, Any]) -> bool:
    """Whether a server averages the dense half of a model of so many kilobytes."""

    class Wide(Model):
        def __init__(self) -> None:
            super().__init__(branches=False)
            self.wide = nn.Parameter(torch.zeros(width, 256))

    loop = hp.TrainerLoop(
        Wide(), ctx,
        loss=lambda output, batch: output.mean(),
        dense_optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        sparse_optimizer=hp.optim.SGD(lr=0.1),
        **options,
    )  # fmt: skip
    return loop._steps.averaging is not None
