"""The gradients of a slab's rows: joined from the trainers', split into parts, summed by row.

Shapes: N ids, B bags, U distinct rows among the ids, D columns.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.features import bag_lengths
from hybridpar.kernels import gather_rows
from hybridpar.messages import SlabLookup, SlabPush

_CACHED_VALUES = 1 << 18  # of float32: a megabyte
_WORTH_SPLITTING = 8192  # ids from which two threads beat one


class BagGradients(NamedTuple):
    """The gradient of a sum-pooled lookup, before it is expanded to rows.

    ``indices`` (N,) are rows of the slab, repeats allowed; ``bags`` (N,) says for each which row of
    ``grads`` (B, D) is its gradient, None that it is the one of the same number.
    """

    indices: Tensor
    bags: Tensor | None
    grads: Tensor

    def summed(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The distinct rows, and the sum of each one's gradients: some (U,) and (U, D) at a time.

        Repeats are summed in the order of ``indices``, whatever the number of threads. What is done
        with some rows stays in the cache, and little memory is held.
        """
        ordered, order = torch.sort(self.indices, stable=True)
        rows, counts = torch.unique_consecutive(ordered, return_counts=True)
        bags = order if self.bags is None else self.bags[order]
        starts = counts.cumsum(0) - counts
        some = max(1, _CACHED_VALUES // self.grads.shape[1])
        for first in range(0, len(rows), some):
            last = first + some
            begin, end = int(starts[first]), int(starts[last]) if last < len(rows) else len(bags)
            own = starts[first:last] - begin
            yield rows[first:last], F.embedding_bag(bags[begin:end], self.grads, own, mode="sum")

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


Action: TypeAlias = Callable[[Sequence[BagGradients]], None]
RunAll: TypeAlias = Callable[[Action, Sequence[BagGradients], Sequence[int]], None]
"""Called with an action, gradients, and the row that each table of the slab begins at: acts once on
all of them whole, or several times on parts that have no row in common."""


def run_in_turn(action: Action, gradients: Sequence[BagGradients], _: Sequence[int]) -> None:
    """Act on whole gradients, on the calling thread."""
    action(gradients)


class Lanes:
    """Splits large updates by row over threads: no two touch a row, so none waits for another.

    In sync mode the trainers wait for the update, and their cores are free. Where a slab holds
    several tables, their ids come one table after another, so cutting between two tables costs
    next to nothing; else each thread picks out its own rows.

    Args:
        most: at most so many threads; as many as there are trainers, say.
    """

    def __init__(self, most: int) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self._count = 1 << (max(1, min(most, cores)).bit_length() - 1)
        self._pool = ThreadPoolExecutor(max(1, self._count - 1), thread_name_prefix="lane")

    def __call__(
        self, action: Action, gradients: Sequence[BagGradients], starts: Sequence[int]
    ) -> None:
        """A `RunAll`."""
        count = self._count
        if count == 1 or sum(each.indices.numel() for each in gradients) < _WORTH_SPLITTING:
            action(gradients)
            return
        cuts = _cuts_between_tables(gradients, starts, count)

        def act(number: int) -> None:
            if cuts is None:
                action([each.part(number, count) for each in gradients])
            else:
                positions = [own[number : number + 2] for own in cuts]
                action([g.between(*own) for g, own in zip(gradients, positions, strict=True)])

        others = [self._pool.submit(act, number) for number in range(1, count)]
        act(0)
        for other in others:
            other.result()


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


def joined(gradients: Sequence[BagGradients]) -> BagGradients:
    """Several gradients as one, in a copy."""
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
