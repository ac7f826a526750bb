"""The moves of rows by `hybridpar.kernels._native`, compiled where there was a C compiler.

They take a quarter to a half of the times of `by_torch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpar.kernels.groups import Groups

try:
    from hybridpar.kernels import _native
except ImportError:  # installed where there was no compiler
    AVAILABLE = False
else:
    AVAILABLE = True


class Rule(IntEnum):
    """The update rules that are compiled, by their numbers in ``native/steps.c``."""

    ADAGRAD = 0
    ROW_WISE_ADAGRAD = 1
    ADAM = 2
    ROW_WISE_ADAM = 3


class Step(NamedTuple):
    """One step of a rule.

    Attributes:
        rule: which.
        lr: its learning rate, all corrections included.
        eps: as in torch's optimizers.
        decay: weight decay that is part of the gradient.
        shrink: by how much of itself a row is shrunk apart from that.
        betas: of the first and second moment.
        root_correction: what the second moment's root is divided by.
    """

    rule: Rule
    lr: float
    eps: float
    decay: float = 0.0
    shrink: float = 0.0
    betas: tuple[float, float] = (0.0, 0.0)
    root_correction: float = 1.0


def fits(values: Tensor) -> bool:
    """Whether they move such values."""
    return values.dtype == torch.float32 and values.is_contiguous() and values.shape[1] > 0


def all_below(ids: Tensor, limit: int) -> bool:
    """By one look at each, up to the first that is not."""
    ids = ids.contiguous()
    return _native.first_beyond(ids.data_ptr(), ids.numel(), limit) < 0


def are_starts(offsets: Tensor, count: int) -> bool:
    """By one look at each, up to the first that is none."""
    offsets = offsets.contiguous()
    return _native.in_order(offsets.data_ptr(), offsets.numel(), count)


def shifted(parts: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Each written where it belongs."""
    out = torch.empty(sum(rows.numel() for rows, _ in parts), dtype=torch.int64, device="cpu")
    address = out.data_ptr()
    for rows, by in parts:
        rows, count = rows.contiguous(), rows.numel()
        _native.shift(rows.data_ptr(), count, by, address)
        address += count * out.element_size()
    return out


def bag_numbers(parts: Sequence[tuple[Tensor | None, int, int]]) -> Tensor:
    """By walking along the bags."""
    out = torch.empty(sum(count for _, count, _ in parts), dtype=torch.int64, device="cpu")
    address, first = out.data_ptr(), 0
    for offsets, count, num_bags in parts:
        starts = None if offsets is None else offsets.contiguous()
        _native.number_bags(
            0 if starts is None else starts.data_ptr(), num_bags, count, first, address
        )
        address += count * out.element_size()
        first += num_bags
    return out


def gather_rows(source: Tensor, rows: Tensor) -> Tensor:
    """Copies, each row asked for before it is needed."""
    rows = rows.contiguous()
    out = torch.empty(rows.numel(), source.shape[1], dtype=torch.float32, device="cpu")
    num_rows, width = source.shape
    _native.gather(source.data_ptr(), num_rows, width, rows.data_ptr(), len(rows), out.data_ptr())
    return out


def add_bags(
    target: Tensor, rows: Tensor, offsets: Tensor | None, values: Tensor, factor: float,
    part: int, parts: int,
) -> None:  # fmt: skip
    """In one pass: nothing is expanded or copied, and every part picks out its own rows."""
    rows, values = rows.contiguous(), values.contiguous()
    starts = None if offsets is None else offsets.contiguous()
    bags = len(rows) if starts is None else len(starts)
    if values.shape != (bags, target.shape[1]) or values.dtype != torch.float32:
        raise ValueError(f"values {tuple(values.shape)} for {bags} bags of a {tuple(target.shape)}")
    _native.add_bags(
        target.data_ptr(), target.shape[0], target.shape[1], rows.data_ptr(), len(rows),
        0 if starts is None else starts.data_ptr(), len(values), values.data_ptr(), factor, part,
        parts,
    )  # fmt: skip


def grouped(rows: Tensor, bags: Tensor | None, parts: int) -> Callable[[int], Groups]:
    """By hashing, each part its own rows."""
    rows = rows.contiguous()
    bags = None if bags is None else bags.contiguous()

    def part(number: int) -> Groups:
        distinct, starts, order = torch.empty(3, len(rows), dtype=torch.int64, device="cpu")
        found, total = _native.group(
            rows.data_ptr(), 0 if bags is None else bags.data_ptr(), len(rows), number, parts,
            distinct.data_ptr(), starts.data_ptr(), order.data_ptr(),
        )  # fmt: skip
        return Groups(distinct[:found], starts[:found], order[:total])

    return part


def step_rows(
    step: Step, table: Tensor, states: Sequence[Tensor], groups: Groups,
    grads: Sequence[Tensor], factor: float,
) -> None:  # fmt: skip
    """One step of some rows, in one pass.

    Args:
        step: of which rule.
        table: (R, D) float32.
        states: (R, their widths) float32, the rule's, in its order.
        groups: the ids by row.
        grads: float32, each (its bags, D): the bags are counted through all of them.
        factor: what a row's gradient is multiplied by.
    """
    first, second = states[0], states[1] if len(states) > 1 else None
    grads = [each.contiguous() for each in grads]
    sources = torch.tensor([[g.data_ptr(), len(g)] for g in grads], dtype=torch.int64, device="cpu")
    beta1, beta2 = step.betas
    _native.step_rows(
        step.rule, table.data_ptr(), table.shape[0], table.shape[1],
        first.data_ptr(), first.shape[1],
        0 if second is None else second.data_ptr(), 0 if second is None else second.shape[1],
        groups.rows.data_ptr(), groups.starts.data_ptr(), len(groups.rows), groups.bags.data_ptr(),
        len(groups.bags), sources.data_ptr(),
        sum(map(len, grads)), factor, step.lr, step.eps, step.decay,
        step.shrink, beta1, beta2, step.root_correction,
    )  # fmt: skip
