"""The work that the sides of compare.py do: the same tables, batches and dense half for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

NUM_CLASSES = 8
NUM_DENSE = 13
LR = 0.05


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the comparison.

    Attributes:
        name: what it is called.
        rows: rows of each table.
        dim: columns of each table.
        tables: how many tables.
        bags: samples a trainer has in a step.
        ids: ids in each bag; 0 for the tutorial's random batches of 20 to 50 ids.
        zipf: whether ids follow Zipf's law (exponent 1.05), not the uniform one.
        dlrm: whether the dense half is DLRM's two MLPs, not one linear layer.
        row_wise_adagrad: whether the tables are stepped by RowWiseAdagrad, not SGD.
        dense_gradients: whether the tutorial's side makes gradients as large as its tables.
        steps: how many steps are timed.
    """

    name: str
    rows: int
    dim: int
    tables: int = 1
    bags: int = 2048
    ids: int = 10
    zipf: bool = False
    dlrm: bool = False
    row_wise_adagrad: bool = False
    dense_gradients: bool = False
    steps: int = 150


CASES = {
    case.name: case
    for case in (
        Case(name="tutorial", rows=100, dim=16, bags=0, ids=0, steps=500),
        Case(name="large", rows=1_000_000, dim=64),
        Case(name="large-zipf", rows=1_000_000, dim=64, zipf=True),
        Case(name="literal", rows=1_000_000, dim=64, bags=512, dense_gradients=True, steps=40),
        Case(name="tables", rows=100_000, dim=16, tables=26, ids=1),
        Case(name="dlrm", rows=100_000, dim=16, tables=26, ids=1, dlrm=True, steps=60),
        Case(name="adagrad", rows=1_000_000, dim=64, row_wise_adagrad=True),
        *(
            Case(name=f"rows-{rows:.0e}".replace("+0", ""), rows=rows, dim=64)
            for rows in (10_000, 100_000, 1_000_000, 10_000_000)
        ),
    )
}


class Batch(NamedTuple):
    """One trainer's batch: for each table ids and offsets, 13 dense features, a class a sample."""

    ids: list[Tensor]
    offsets: Tensor
    features: Tensor
    target: Tensor


def make_batches(case: Case, rank: int, count: int = 16) -> list[Batch]:
    """A trainer's batches; a run goes round them."""
    draw = torch.Generator().manual_seed(1000 + rank)
    return [_make_batch(case, draw) for _ in range(count)]


def _make_batch(case: Case, draw: torch.Generator) -> Batch:
    if case.ids == 0:
        total = int(torch.randint(20, 51, (), generator=draw))
        lengths = torch.randint(1, 11, (total,), generator=draw).cumsum(0)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[lengths < total]])
    else:
        total = case.bags * case.ids
        offsets = torch.arange(0, total, case.ids)
    bags = offsets.numel()
    return Batch(
        [_draw_ids(case, total, draw) for _ in range(case.tables)],
        offsets,
        torch.rand(bags, NUM_DENSE, generator=draw),
        torch.randint(NUM_CLASSES, (bags,), generator=draw),
    )


def _draw_ids(case: Case, count: int, draw: torch.Generator) -> Tensor:
    if not case.zipf:
        return torch.randint(case.rows, (count,), generator=draw)
    # Inverse of the continuous power law of exponent s on [1, rows].
    s, uniform = 1.05, torch.rand(count, generator=draw, dtype=torch.float64)
    top = case.rows ** (1 - s)
    ranks = (1 - uniform * (1 - top)) ** (1 / (1 - s))
    return (ranks.long() - 1).clamp_(0, case.rows - 1)


class DenseHalf(nn.Module):
    """What is trained on top of the tables: logits from their pooled rows."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width = case.tables * case.dim
        if case.dlrm:
            self.bottom = nn.Sequential(
                nn.Linear(NUM_DENSE, 64), nn.ReLU(), nn.Linear(64, case.dim), nn.ReLU()
            )
            self.top = nn.Sequential(
                nn.Linear(width + case.dim, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(),
                nn.Linear(64, NUM_CLASSES),
            )  # fmt: skip
        else:
            self.bottom = None
            self.top = nn.Linear(width, NUM_CLASSES)

    def forward(self, pooled: list[Tensor], features: Tensor) -> Tensor:
        parts = pooled if self.bottom is None else [*pooled, self.bottom(features)]
        return self.top(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
