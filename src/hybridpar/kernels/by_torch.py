"""The moves of rows by the fastest plain-torch way measured on the CPU.

Figures: torch 2.13, one thread, 40,000 rows of 64 columns out of a million.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.kernels.bags import bag_lengths
from hybridpar.kernels.groups import Groups

_CACHED_BYTES = 1 << 19  # of rows: half of a small second-level cache
_WIDE_BYTES = 128  # a row of one or two cache lines gains nothing
_ONE_BAG = torch.zeros(1, dtype=torch.int64)
_BY_RADIX = 1 << 15  # ids from which torch sorts by radix, in less time than half as many
_WORTH_PADDING = 1 << 13


def all_below(ids: Tensor, limit: int) -> bool:
    """By the least and the largest."""
    if not ids.numel():
        return True
    low, high = torch.aminmax(ids)
    return int(low) >= 0 and int(high) < limit


def are_starts(offsets: Tensor, count: int) -> bool:
    """By their differences."""
    if not offsets.numel():
        return count == 0
    steps = offsets[1:] - offsets[:-1]
    rises = not steps.numel() or int(steps.min()) >= 0
    return int(offsets[0]) == 0 and rises and int(offsets[-1]) <= count


def shifted(parts: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Each added to, then all joined."""
    return torch.cat([rows + by if by else rows for rows, by in parts])


def bag_numbers(parts: Sequence[tuple[Tensor | None, int, int]]) -> Tensor:
    """By repeating each as often as it has ids."""
    numbers, first = [], 0
    for offsets, count, num_bags in parts:
        own = torch.arange(first, first + num_bags)
        if offsets is not None:
            own = own.repeat_interleave(bag_lengths(offsets, count), output_size=count)
        numbers.append(own)
        first += num_bags
    return torch.cat(numbers)


def gather_rows(source: Tensor, rows: Tensor) -> Tensor:
    """As bags of one id each: 1.2 ms, where ``index_select`` takes 3.5."""
    return F.embedding_bag(rows, source, torch.arange(rows.numel()), mode="sum")


def add_bags(
    target: Tensor, rows: Tensor, offsets: Tensor | None, values: Tensor, factor: float,
    part: int, parts: int,
) -> None:  # fmt: skip
    """By ``scatter_add_``, which has a kernel of its own over an expanded index.

    1.4 ms for 20,480 rows, where ``index_add_`` takes 4 to 7. It waits for memory row by row, so
    wide rows are first brought into the cache by a kernel that asks for many at once, some at a
    time: 0.95 ms.
    """
    values = values * factor
    bags = None
    if offsets is not None:
        bags = bag_numbers([(offsets, rows.numel(), len(values))])
    if parts > 1:
        mine = (rows.bitwise_and(parts - 1) == part).nonzero().squeeze(1)
        rows, bags = rows[mine], mine if bags is None else bags[mine]
    width = target.shape[1] * target.element_size()
    chunk = max(1, _CACHED_BYTES // width) if width >= _WIDE_BYTES else max(1, rows.numel())
    for start in range(0, rows.numel(), chunk):
        some = rows[start : start + chunk]
        if rows.numel() > chunk:
            F.embedding_bag(some, target, _ONE_BAG, mode="sum")  # for the reading alone
        own = (
            values[start : start + chunk]
            if bags is None
            else gather_rows(values, bags[start : start + chunk])
        )
        target.scatter_add_(0, some.unsqueeze(1).expand_as(own), own)


def grouped(rows: Tensor, bags: Tensor | None, parts: int) -> Callable[[int], Groups]:
    """By sorting, once for all parts: sorted, they are cut between any two rows."""
    ordered, order = _sorted(rows)
    distinct, counts = torch.unique_consecutive(ordered, return_counts=True)
    own = order if bags is None else bags[order]
    whole = Groups(distinct.long(), counts.cumsum(0) - counts, own)
    size = len(own)

    def part(number: int) -> Groups:
        ends = torch.tensor([size * number // parts, size * (number + 1) // parts])
        first, last = torch.searchsorted(whole.starts, ends).tolist()
        return whole.some(first, last)

    return part


def _sorted(indices: Tensor) -> tuple[Tensor, Tensor]:
    """The indices, ascending, equal ones in their order; and where each one was.

    32,768 and more torch sorts by radix, int32 in half the time of int64; fewer take it longer.
    """
    size, largest = len(indices), torch.iinfo(torch.int32).max
    if size < _WORTH_PADDING or int(indices.max()) >= largest:
        ordered, order = torch.sort(indices, stable=True)
        return ordered, order
    narrow = indices.int()
    if size < _BY_RADIX:
        narrow = F.pad(narrow, (0, _BY_RADIX - size), value=largest)
    ordered, order = torch.sort(narrow, stable=True)
    return ordered[:size], order[:size]
