"""The memory-bound moves of rows: compiled where they could be, else by torch alone.

Both give the same to the last digits; ``HYBRIDPAR_KERNELS=torch`` in the environment takes torch's.
Numbers of rows are int64, and all is on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.kernels import by_torch, compiled
from hybridpar.kernels.bags import bag_lengths
from hybridpar.kernels.groups import Groups

__all__ = [
    "Groups",
    "add_bags",
    "add_rows",
    "all_below",
    "are_compiled",
    "are_starts",
    "bag_lengths",
    "bag_numbers",
    "gather_rows",
    "grouped",
    "pool_rows",
    "shifted",
]

_compiled: bool = compiled.AVAILABLE and os.environ.get("HYBRIDPAR_KERNELS", "") != "torch"


def are_compiled() -> bool:
    """Whether the compiled ones are in use."""
    return _compiled


def all_below(ids: Tensor, limit: int) -> bool:
    """Whether all (N,) int64 ids are from 0 to below a limit."""
    return compiled.all_below(ids, limit) if _compiled else by_torch.all_below(ids, limit)


def are_starts(offsets: Tensor, count: int) -> bool:
    """Whether (B,) int64 numbers can be where bags begin among ``count`` ids.

    They are if the first is 0, none is below the one before it, and none beyond the end; or if
    there are neither bags nor ids.
    """
    chosen = compiled.are_starts if _compiled else by_torch.are_starts
    return chosen(offsets, count)


def shifted(parts: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Several (N,) int64 tensors, to each its own number added, as one."""
    (rows, by), *others = parts
    if not by and not others:
        return rows
    return compiled.shifted(parts) if _compiled else by_torch.shifted(parts)


def bag_numbers(parts: Sequence[tuple[Tensor | None, int, int]]) -> Tensor:
    """Of each id the number of its bag, through all parts: (their counts together,) int64.

    Args:
        parts: for each its (B,) offsets, None if every id is a bag; the count of its ids; and B.
    """
    return compiled.bag_numbers(parts) if _compiled else by_torch.bag_numbers(parts)


def gather_rows(source: Tensor, rows: Tensor) -> Tensor:
    """``source[rows]``: (N, D) from (R, D) and (N,)."""
    if _compiled and compiled.fits(source):
        return compiled.gather_rows(source, rows)
    return by_torch.gather_rows(source, rows)


def add_bags(
    target: Tensor, rows: Tensor, offsets: Tensor | None, values: Tensor, factor: float = 1.0, *,
    part: int = 0, parts: int = 1,
) -> None:  # fmt: skip
    """Add a bag's values to each of the bag's rows, in place, repeats included, in order.

    Args:
        target: (R, D) float32.
        rows: (N,), the bags' rows.
        offsets: (B,) start of each bag; None if every bag is one row.
        values: (B, D) float32.
        factor: what the values are multiplied by.
        part: of several parts, which no two have a row in common, the number of the one to add.
        parts: how many parts; a power of two.
    """
    chosen = compiled if _compiled and compiled.fits(target) else by_torch
    chosen.add_bags(target, rows, offsets, values, factor, part, parts)


def add_rows(target: Tensor, rows: Tensor, values: Tensor) -> None:
    """``target[rows] += values`` in place: (R, D) float32, (N,), (N, D)."""
    add_bags(target, rows, None, values)


def grouped(rows: Tensor, bags: Tensor | None = None, *, parts: int = 1) -> Callable[[int], Groups]:
    """A function from a part's number to the ids of its rows, by row.

    Args:
        rows: (N,), the row that each id means.
        bags: (N,), the bag that it is in; None if each is one of its own.
        parts: how many parts; a power of two.
    """
    make = compiled.grouped if _compiled else by_torch.grouped
    return make(rows, bags, parts)


def pool_rows(source: Tensor, rows: Tensor, offsets: Tensor | None) -> Tensor:
    """The sum of each bag's rows: (B, D) float32; an empty bag gives zeros.

    torch's own kernel is as fast as any.

    Args:
        source: (R, D) of any floating dtype.
        rows: (N,).
        offsets: (B,) start of each bag; None if every bag is one id.
    """
    if offsets is None:
        return gather_rows(source, rows).float()
    if source.dtype == torch.float32:
        return F.embedding_bag(rows, source, offsets, mode="sum")
    values = gather_rows(source, rows).float()  # summed in float32
    return F.embedding_bag(torch.arange(len(values)), values, offsets, mode="sum")
