"""Train functions of test_evaluation. Imports no test tool."""

from __future__ import annotations

import torch

import hybridpar as hp
from hybridpar.metrics import AUC, Accuracy
from saved import make_loop
from worlds import Batch, make_batch

ALL = [make_batch(seed, bags=True, size=3 + seed % 4) for seed in range(9)]


def run(ctx: hp.TrainerContext, mode: str) -> tuple[dict[str, float], bool]:
    """Evaluate without training; the last of several trainers has no batch."""
    loop = make_loop(ctx, None, consistency=mode)
    sharing = max(1, ctx.num_trainers - 1)
    mine: list[Batch] = ALL[ctx.rank :: sharing] if ctx.rank < sharing else []
    before = loop.model.rows("item")
    found = loop.evaluate(
        mine,
        metrics={"accuracy": Accuracy(), "auc": AUC()},
        inputs=lambda output, batch: (output[:, 0], (batch.label == 0).long()),
    )
    untouched = torch.equal(before, loop.model.rows("item"))
    return found, untouched and all(module.training for module in loop.model.modules())
