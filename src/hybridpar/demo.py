"""The job of ``hybridpar demo``: PyTorch's DDP-with-RPC tutorial, on hybridpar.

https://docs.pytorch.org/tutorials/advanced/rpc_ddp_tutorial.html
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from hybridpar import optim
from hybridpar.features import FeatureValue
from hybridpar.specs import RemoteEmbeddingSpec
from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.loop import TrainerLoop
from hybridpar.trainer.model import HybridModel
from hybridpar.trainer.progress import FitResult

NUM_CLASSES = 8
LEARNING_RATE = 0.05
BATCHES_AN_EPOCH = 10


class Bags(NamedTuple):
    """One batch: ids (N,) in bags that start at offsets (B,), and a class (B,) for each bag."""

    indices: Tensor
    offsets: Tensor
    target: Tensor


class Demo(HybridModel[Bags]):
    """An embedding bag on the servers under one linear layer on the trainers."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(
            RemoteEmbeddingSpec(
                "emb", num_embeddings=num_embeddings, embedding_dim=embedding_dim, mode="sum"
            )
        )
        self.fc = nn.Linear(embedding_dim, NUM_CLASSES)

    @override
    def sparse_inputs(self, batch: Bags) -> dict[str, FeatureValue]:
        return {"emb": (batch.indices, batch.offsets)}

    @override
    def forward(self, embeddings: dict[str, Tensor], batch: Bags) -> Tensor:
        output: Tensor = self.fc(embeddings["emb"])
        return output


def random_batches(num_embeddings: int, device: torch.device) -> Iterator[Bags]:
    """Ten random batches of 20 to 50 ids in bags of 1 to 10, as the tutorial draws them."""
    for _ in range(BATCHES_AN_EPOCH):
        num_indices = random.randint(20, 50)
        indices = torch.randint(num_embeddings, (num_indices,))
        offsets = [0]
        while (start := offsets[-1] + random.randint(1, 10)) < num_indices:
            offsets.append(start)
        target = torch.randint(NUM_CLASSES, (len(offsets),), device=device)
        yield Bags(indices, torch.tensor(offsets), target)


def train(
    ctx: TrainerContext, epochs: int, num_embeddings: int, embedding_dim: int, seed: int
) -> list[FitResult]:
    """The train function: one :class:`FitResult` for each epoch."""
    torch.manual_seed(seed + ctx.rank)
    random.seed(seed + ctx.rank)
    loop = TrainerLoop(
        Demo(num_embeddings, embedding_dim),
        ctx,
        loss=lambda output, batch: F.cross_entropy(output, batch.target),
        dense_optimizer=lambda params: torch.optim.SGD(params, lr=LEARNING_RATE),
        sparse_optimizer=optim.SGD(lr=LEARNING_RATE),
        progress=False,  # it fits one epoch after another, and says so itself
    )
    results = []
    for epoch in range(epochs):
        results.append(loop.fit(random_batches(num_embeddings, ctx.device)))
        if ctx.rank == 0:
            print(f"Training done for epoch {epoch}", flush=True)
    return results
