"""Train functions and process targets of test_shared_memory. Imports no test tool."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hybridpar as hp
from hybridpar.shared_memory import Handle, as_tensor, attach


def double(handle: Handle, answer: Connection) -> None:
    memory = attach(handle)
    assert memory is not None
    as_tensor(memory, (16,), torch.float32).mul_(2.0)
    answer.send(True)
    answer.close()


class Model(hp.HybridModel[tuple[Tensor, Tensor]]):
    def __init__(self, *tables: str) -> None:
        limits = {"a": None, "limited": 1.0}
        super().__init__(
            *(
                hp.RemoteEmbeddingSpec(
                    name, num_embeddings=50, embedding_dim=4, seed=1, max_norm=limits[name]
                )
                for name in tables
            )
        )
        torch.manual_seed(3)
        self.top = nn.Linear(4, 1)

    def sparse_inputs(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {spec.name: batch[0] for spec in self.specs}

    def forward(self, embeddings: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.top(sum(embeddings.values())).squeeze(1)


def batches(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(rank)
    return [
        (torch.randint(50, (8,), generator=draw), torch.rand(8, generator=draw))
        for _ in range(count)
    ]


def make_loop(
    ctx: hp.TrainerContext, *tables: str, **settings
) -> hp.TrainerLoop[tuple[Tensor, Tensor]]:
    return hp.TrainerLoop(
        Model(*tables), ctx,
        loss=lambda output, batch: F.mse_loss(output, batch[1]),
        dense_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        sparse_optimizer=hp.optim.SGD(lr=0.1), **settings,
    )  # fmt: skip


def rows_after(ctx: hp.TrainerContext, wire_dtype: torch.dtype) -> Tensor:
    loop = make_loop(ctx, "a", wire_dtype=wire_dtype)
    loop.fit(batches(ctx.rank, 20))
    return loop.model.rows("a")


def what_is_shared(
    ctx: hp.TrainerContext, consistency: str
) -> tuple[dict[str, bool], tuple[int, int]]:
    """Which tables this trainer reads itself; and its open files before and after training."""
    loop = make_loop(ctx, "a", "limited", consistency=consistency)
    loop.fit(batches(ctx.rank, 5))
    before = len(os.listdir("/proc/self/fd"))
    loop.fit(batches(ctx.rank, 20))
    after = len(os.listdir("/proc/self/fd"))
    tables = loop.model._connected
    read_here = {
        name: all((s.server, s.slab) in tables._weights for s in placement.shards)
        for name, placement in tables.plan.placements.items()
    }
    return read_here, (before, after)
