"""The gradients of a slab's rows: the trainers' together, split into parts, summed by row.

Shapes: N ids, B bags, U distinct rows among the ids, D columns.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.features import bag_lengths
from hybridpar.kernels import gather_rows
from hybridpar.messages import SlabLookup, SlabPush

_CACHED_VALUES = 1 << 18  # of float32: a megabyte
_BY_RADIX = 1 << 15  # ids from which torch sorts by radix, in less time than half as many
_WORTH_PADDING = 1 << 13


class BagGradients(NamedTuple):
    """The gradient of a sum-pooled lookup, before it is expanded to rows.

    ``indices`` (N,) are rows of the slab, repeats allowed; ``bags`` (N,) says for each which row of
    ``grads`` (B, D) is its gradient, None that it is the one of the same number.
    """

    indices: Tensor
    bags: Tensor | None
    grads: Tensor

    def between(self, start: int, end: int) -> BagGradients:
        """The gradients of the ids from one position to another."""
        if self.bags is None:
            return BagGradients(self.indices[start:end], None, self.grads[start:end])
        return BagGradients(self.indices[start:end], self.bags[start:end], self.grads)

    def part(self, number: int, of: int) -> BagGradients:
        """The gradients of the rows ``number, number + of, …``; ``of`` is a power of two."""
        mine = (self.indices.bitwise_and(of - 1) == number).nonzero().squeeze(1)
        if self.bags is None:
            return BagGradients(self.indices[mine], None, gather_rows(self.grads, mine))
        return BagGradients(self.indices[mine], self.bags[mine], self.grads)


class RowGradients(NamedTuple):
    """Gradients in the order of the rows: which ids each distinct row has, and their gradients.

    ``rows`` (U,) ascend; ``starts`` (U,) says where in ``bags`` (N,) each one's ids begin, and
    ``bags`` which row of ``grads`` (B, D) is an id's gradient.
    """

    rows: Tensor
    starts: Tensor
    bags: Tensor
    grads: Tensor

    def part(self, number: int, of: int) -> RowGradients:
        """One of several parts that have no row in common, and about as many ids each."""
        size = len(self.bags)
        begin, end = (size * number // of, size * (number + 1) // of)
        first, last = torch.searchsorted(self.starts, torch.tensor([begin, end])).tolist()
        return RowGradients(*self._some(first, last), self.grads)

    def sums(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The sum of each row's gradients: some rows (U,) and their sums (U, D) at a time.

        They are summed in the order in which the ids came. What is done with some rows stays in the
        cache, and little memory is held.
        """
        some = max(1, _CACHED_VALUES // self.grads.shape[1])
        for first in range(0, len(self.rows), some):
            rows, starts, bags = self._some(first, first + some)
            yield rows, F.embedding_bag(bags, self.grads, starts, mode="sum")

    def _some(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        starts = self.starts[first:last]
        if not len(starts):
            return self.rows[first:last], starts, self.bags[:0]
        begin = int(starts[0])
        end = int(self.starts[last]) if last < len(self.starts) else len(self.bags)
        return self.rows[first:last], starts - begin, self.bags[begin:end]


def by_row(gradients: Sequence[BagGradients]) -> RowGradients:
    """Several gradients by row; a row's are in their order, one gradient's after another's."""
    indices, bags, grads = _joined(gradients)
    ordered, order = _sorted(indices)
    rows, counts = torch.unique_consecutive(ordered, return_counts=True)
    own = order if bags is None else bags[order]
    return RowGradients(rows.long(), counts.cumsum(0) - counts, own, grads)


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


class Split:
    """Gradients in parts that have no row in common.

    Where a slab holds several tables, their ids come one table after another, so that cutting
    between two of them costs next to nothing.

    Args:
        gradients: the trainers', in rank order.
        starts: the row that each table of the slab begins at.
        count: how many parts; a power of two.
    """

    def __init__(
        self, gradients: Sequence[BagGradients], starts: Sequence[int], count: int
    ) -> None:
        self._gradients = gradients
        self._count = count
        self._cuts = _cuts_between_tables(gradients, starts, count)

    def part(self, number: int) -> list[BagGradients]:
        """One part of each gradient; where there is no cut, its rows are picked out."""
        if self._cuts is None:
            return [each.part(number, self._count) for each in self._gradients]
        return [
            each.between(*own[number : number + 2])
            for each, own in zip(self._gradients, self._cuts, strict=True)
        ]

    def by_row(self) -> Callable[[int], RowGradients]:
        """A function from a part's number to its gradients by row."""
        if self._cuts is None:  # sorted once for all, they are cut between any two rows
            whole = by_row(self._gradients)
            return lambda number: whole.part(number, self._count)
        return lambda number: by_row(self.part(number))


def _cuts_between_tables(
    gradients: Sequence[BagGradients], starts: Sequence[int], count: int
) -> list[list[int]] | None:
    """For each gradient the positions, 0 and N too, between which it falls into ``count`` parts.

    None if the ids are not in the order of the tables, or the parts would be far from equal.
    """
    first = gradients[0].indices
    middles = first[[len(first) * k // count for k in range(1, count)]].tolist()
    borders = [starts[bisect.bisect_right(starts, row) - 1] for row in middles]
    cuts = []
    for indices in (each.indices for each in gradients):
        own = [0]
        for border in borders:
            own.append(int((indices < border).sum()))
            if own[-1] <= own[-2] or int(indices[: own[-1]].max()) >= border:
                return None
        own.append(len(indices))
        if max(end - start for start, end in itertools.pairwise(own)) * count > 1.3 * len(indices):
            return None
        cuts.append(own)
    return cuts


def of_bags(push: SlabPush) -> BagGradients:
    """One push's gradients."""
    lookup = push.lookup
    assert isinstance(lookup, SlabLookup)
    grads = push.grads.float()
    if lookup.offsets is None:
        return BagGradients(lookup.indices, None, grads)
    lengths = bag_lengths(lookup.offsets, lookup.indices.numel())
    bags = torch.arange(len(lengths)).repeat_interleave(lengths, output_size=len(lookup.indices))
    return BagGradients(lookup.indices, bags, grads)


def _joined(gradients: Sequence[BagGradients]) -> BagGradients:
    """Several gradients as one."""
    if len(gradients) == 1:
        return gradients[0]
    indices = torch.cat([each.indices for each in gradients])
    grads = torch.cat([each.grads for each in gradients])
    if all(each.bags is None for each in gradients):
        return BagGradients(indices, None, grads)
    bags, before = [], 0
    for each in gradients:
        own = torch.arange(len(each.indices)) if each.bags is None else each.bags
        bags.append(own + before)
        before += len(each.grads)
    return BagGradients(indices, torch.cat(bags), grads)
