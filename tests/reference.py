"""The model of the tests in one plain torch process: what hybridpar must equal.

Written apart from hybridpar's code: dense gradients, torch's optimizers, and the one rule that
torch lacks spelled out over the whole table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worlds import DIM, LABELS, SEEDS, SIZES, USER_DIM, Batch, Case, Trained, batches_of


class RowWiseAdagrad(torch.optim.Optimizer):
    """One accumulator a row: the mean of the row's squared gradients, summed over steps."""

    def __init__(self, params: list[Tensor], lr: float, eps: float, initial: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})
        for param in params:
            self.state[param]["sum"] = torch.full((param.shape[0], 1), initial)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                total = self.state[param]["sum"]
                total += (param.grad**2).mean(dim=1, keepdim=True)
                param -= group["lr"] * param.grad / (total.sqrt() + group["eps"])


class Plain(nn.Module):
    def __init__(self, mode: str | None) -> None:
        super().__init__()
        self.mode = mode
        self.tables = nn.ModuleDict()
        for name, (rows, dim) in SIZES.items():
            torch.manual_seed(SEEDS[name])
            self.tables[name] = (
                nn.Embedding(rows, dim)
                if name == "user" or (name == "item" and mode is None)
                else nn.EmbeddingBag(rows, dim, mode="mean" if name == "word" else mode)
            )
        torch.manual_seed(5)
        self.top = nn.Linear(DIM + USER_DIM + DIM, LABELS)

    def forward(self, batch: Batch) -> Tensor:
        items = (batch.items,) if batch.offsets is None else (batch.items, batch.offsets)
        parts = [
            self.tables["item"](*items),
            self.tables["user"](batch.users),
            self.tables["word"](batch.words),
        ]
        return self.top(torch.cat(parts, dim=1))


def sparse_optimizer(case: Case, params: list[Tensor]) -> torch.optim.Optimizer:
    if case.optimizer == "SGD":
        return torch.optim.SGD(params, lr=0.1)
    if case.optimizer == "Adagrad":
        return torch.optim.Adagrad(params, lr=0.1, eps=1e-8, initial_accumulator_value=0.1)
    return RowWiseAdagrad(params, lr=0.1, eps=1e-8, initial=0.1)


def train(case: Case, steps: list[int], epochs: int = 1) -> list[Trained]:
    """What each trainer should end with, had it ``steps[rank]`` batches an epoch."""
    model = Plain(case.mode)
    tables = {name: table.weight for name, table in model.tables.items()}
    sparse = sparse_optimizer(case, list(tables.values()))
    dense = torch.optim.SGD(model.top.parameters(), lr=0.1, momentum=0.5)
    data = [batches_of(rank, count, bags=case.mode is not None) for rank, count in enumerate(steps)]
    losses: list[list[float]] = [[] for _ in steps]
    for _ in range(epochs):
        for step in range(max(steps)):
            active = [rank for rank, count in enumerate(steps) if step < count]
            sparse.zero_grad()
            dense.zero_grad()
            for rank in active:
                batch = data[rank][step]
                loss = F.cross_entropy(model(batch), batch.label)
                losses[rank].append(loss.item())
                (loss / len(active)).backward()
            sparse.step()
            dense.step()
    rows = {name: weight.detach() for name, weight in tables.items()}
    state = (
        {name: sparse.state[weight]["sum"] for name, weight in tables.items()}
        if case.optimizer != "SGD"
        else {}
    )
    top = {f"top.{name}": value.detach() for name, value in model.top.state_dict().items()}
    return [Trained(own, rows, state, top) for own in losses]
