"""The train function of the fault matrix. Imports no test tool."""

from __future__ import annotations

from torch import Tensor

import hybridpar as hp
import injected
from faulty import cross_entropy, make_loop
from worlds import Batch, make_batch


class Result:
    """What a trainer returns: pickled after training, in its shutdown."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self):
        injected.strike(self.name, "shutdown")
        return Result, (self.name,)


def train(ctx: hp.TrainerContext, consistency: str, directory: str | None = None) -> Result:
    def loss(output: Tensor, batch: Batch) -> Tensor:
        injected.strike_step(ctx.name, ctx.step + 1)
        return cross_entropy(output, batch)

    checkpoint = None if directory is None else hp.Checkpoint(directory, every=1)
    make_loop(ctx, loss, consistency=consistency, checkpoint=checkpoint).fit(
        make_batch(1000 * step + ctx.rank, bags=True) for step in range(12)
    )
    return Result(ctx.name)
