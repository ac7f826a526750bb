"""Each update rule against its torch counterpart, or its paper's formula, on the touched rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hybridpar as hp
from hybridpar import optim
from hybridpar.messages import SlabLookup, SlabPush
from hybridpar.server.slab import Slab
from hybridpar.sharding import SlabKind, SlabLayout, SlabPart

ROWS, DIM, STEPS = 12, 4, 6
CLOSE = {"atol": 1e-6, "rtol": 1e-5}

State = dict[str, Tensor]


def slab(settings: optim.SparseOptimizerSettings) -> Slab:
    spec = hp.RemoteEmbeddingSpec("t", num_embeddings=ROWS, embedding_dim=DIM, seed=3)
    alone = "t" if settings.clip_norm is not None else ""
    kind = SlabKind(DIM, torch.float32, settings, None, 2.0, alone)
    return Slab(SlabLayout(kind, (SlabPart("t", 0, 1, 0, 0, ROWS),)), {"t": spec}, "0")


def batches(few: bool) -> list[tuple[Tensor, Tensor]]:
    """Ids and a gradient for each, of every step: all rows, or some with repeats."""
    torch.manual_seed(0)
    drawn = []
    for _ in range(STEPS):
        ids = torch.randint(ROWS, (7,)) if few else torch.randperm(ROWS)
        drawn.append((ids, torch.randn(len(ids), DIM)))
    return drawn


def by_torch(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], **initial: float):
    """A rule: a torch optimizer of which only the touched rows and their state are shown."""

    def step(rows: Tensor, state: State, grad: Tensor, t: int) -> None:
        parameter = nn.Parameter(rows.clone())
        optimizer = make([parameter])
        if isinstance(optimizer, torch.optim.Adagrad):
            optimizer.state[parameter].clear()
        optimizer.state[parameter].update(state)
        has_step = not isinstance(optimizer, torch.optim.SGD)
        if has_step:
            optimizer.state[parameter]["step"] = torch.tensor(float(t - 1))
        parameter.grad = grad
        optimizer.step()
        rows.copy_(parameter.detach())
        for name in state:
            state[name].copy_(optimizer.state[parameter][name])

    return step


def row_wise_adagrad(rows: Tensor, state: State, grad: Tensor, t: int) -> None:
    grad = grad + 0.01 * rows
    state["sum"] += (grad**2).sum(1, keepdim=True) / grad.shape[1]
    rows -= 0.1 * grad / (state["sum"] ** 0.5 + 1e-3)


def row_wise_adam(rows: Tensor, state: State, grad: Tensor, t: int) -> None:
    state["exp_avg"].copy_(0.8 * state["exp_avg"] + 0.2 * grad)
    square = (grad**2).sum(1, keepdim=True) / grad.shape[1]
    state["exp_avg_sq"].copy_(0.9 * state["exp_avg_sq"] + 0.1 * square)
    first = state["exp_avg"] / (1 - 0.8**t)
    second = state["exp_avg_sq"] / (1 - 0.9**t)
    rows -= 0.1 * first / (second**0.5 + 1e-4)


def ftrl(rows: Tensor, state: State, grad: Tensor, t: int) -> None:
    """McMahan et al., algorithm 1, a value at a time."""
    alpha, beta, l1, l2 = 0.5, 1.0, 0.3, 0.1
    for r in range(rows.shape[0]):
        for d in range(rows.shape[1]):
            w, g = float(rows[r, d]), float(grad[r, d])
            z, n = float(state["z"][r, d]), float(state["n"][r, d])
            sigma = (math.sqrt(n + g * g) - math.sqrt(n)) / alpha
            z, n = z + g - sigma * w, n + g * g
            if abs(z) <= l1:
                w = 0.0
            else:
                w = -(z - math.copysign(l1, z)) / ((beta + math.sqrt(n)) / alpha + l2)
            rows[r, d], state["z"][r, d], state["n"][r, d] = w, z, n


RULES = {
    "SGD": (optim.SGD(lr=0.1), by_torch(lambda p: torch.optim.SGD(p, lr=0.1))),
    "SGD decay": (
        optim.SGD(lr=0.1, weight_decay=0.1),
        by_torch(lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1)),
    ),
    "SGD momentum": (
        optim.SGD(lr=0.1, momentum=0.9),
        by_torch(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    ),
    "SGD nesterov": (
        optim.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        by_torch(
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
        ),
    ),
    "Adagrad": (
        optim.Adagrad(lr=0.1, lr_decay=0.3, weight_decay=0.1, initial_accumulator_value=0.2),
        by_torch(lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.3, weight_decay=0.1)),
    ),
    "RowWiseAdagrad": (optim.RowWiseAdagrad(lr=0.1, weight_decay=0.01, eps=1e-3), row_wise_adagrad),
    "Adam": (
        optim.Adam(lr=0.1, betas=(0.8, 0.9), weight_decay=0.1),
        by_torch(lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9), weight_decay=0.1)),
    ),
    "AdamW": (
        optim.AdamW(lr=0.1, betas=(0.8, 0.9), weight_decay=0.2),
        by_torch(lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2)),
    ),
    "RowWiseAdam": (optim.RowWiseAdam(lr=0.1, betas=(0.8, 0.9), eps=1e-4), row_wise_adam),
    "RMSprop": (
        optim.RMSprop(lr=0.1, alpha=0.9, weight_decay=0.1),
        by_torch(lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.9, weight_decay=0.1)),
    ),
    "FTRL": (optim.FTRL(lr=0.5, l1=0.3, l2=0.1), ftrl),
}


@pytest.mark.parametrize("few", [True, False], ids=["some rows", "all rows"])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_equals_its_reference(name: str, few: bool) -> None:
    settings, reference = RULES[name]
    table = slab(settings)
    weight = table.weight.clone()
    state = {name: value.clone() for name, value in table.state.items()}
    for t, (ids, grads) in enumerate(batches(few), start=1):
        table.apply([SlabPush(SlabLookup(ids, None), grads)], lr=settings.lr, divisor=1, t=t)
        touched = ids.unique()
        summed = torch.zeros(ROWS, DIM).index_add(0, ids, grads)[touched]
        rows, part = weight[touched], {name: value[touched] for name, value in state.items()}
        if isinstance(settings, optim.SGD) and settings.momentum and t == 1:
            part = {"momentum_buffer": torch.zeros_like(rows)}
        reference(rows, part, summed, t)
        weight[touched] = rows
        for key, value in part.items():
            state[key][touched] = value
    torch.testing.assert_close(table.weight, weight, **CLOSE)
    for key, value in state.items():
        torch.testing.assert_close(table.state[key], value, **CLOSE)


def test_adam_is_torchs_sparse_adam() -> None:
    settings = optim.Adam(lr=0.1, betas=(0.8, 0.9))
    table = slab(settings)
    parameter = nn.Parameter(table.weight.clone())
    optimizer = torch.optim.SparseAdam([parameter], lr=0.1, betas=(0.8, 0.9))
    for t, (ids, grads) in enumerate(batches(few=True), start=1):
        table.apply([SlabPush(SlabLookup(ids, None), grads)], lr=0.1, divisor=1, t=t)
        parameter.grad = torch.sparse_coo_tensor(
            ids[None], grads, (ROWS, DIM), check_invariants=True
        )
        optimizer.step()
    torch.testing.assert_close(table.weight, parameter.detach(), **CLOSE)


@pytest.mark.parametrize("clip", [{"clip_value": 0.4}, {"clip_norm": 0.5}], ids=str)
def test_gradients_are_clipped_as_torch_does(clip: dict[str, float]) -> None:
    table = slab(optim.SGD(lr=0.1, **clip))
    parameter = nn.Parameter(table.weight.clone())
    for t, (ids, grads) in enumerate(batches(few=True), start=1):
        push = SlabPush(SlabLookup(ids, None), grads)
        parameter.grad = torch.zeros(ROWS, DIM).index_add(0, ids, grads)
        scale = 1.0
        if "clip_norm" in clip:
            scale = min(1.0, 0.5 / (table.gradient_square([push], 1) ** 0.5 + 1e-6))
            nn.utils.clip_grad_norm_([parameter], 0.5)
        else:
            nn.utils.clip_grad_value_([parameter], 0.4)
        table.apply([push], lr=0.1, divisor=1, t=t, scale=scale)
        torch.optim.SGD([parameter], lr=0.1).step()
    torch.testing.assert_close(table.weight, parameter.detach(), **CLOSE)


def test_every_public_rule_is_tested() -> None:
    public = {name for name in optim.__all__ if name != "SparseOptimizerSettings"}
    assert public == {name.split()[0] for name in RULES}
