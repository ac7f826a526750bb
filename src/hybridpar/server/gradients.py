"""The gradients of a slab's rows: joined from the trainers', split into parts, summed by row.

Shapes: N ids, B bags, U distinct rows among the ids, D columns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.features import bag_lengths
from hybridpar.messages import SlabLookup, SlabPush
from hybridpar.server.kernels import gather_rows

_WORTH_SPLITTING = 8192  # ids from which two threads beat one


class BagGradients(NamedTuple):
    """The gradient of a sum-pooled lookup, before it is expanded to rows.

    ``indices`` (N,) are rows of the slab, repeats allowed; ``bags`` (N,) says for each which row of
    ``grads`` (B, D) is its gradient, None that it is the one of the same number.
    """

    indices: Tensor
    bags: Tensor | None
    grads: Tensor

    def expanded(self) -> Tensor:
        """A gradient row for each id: (N, D)."""
        return self.grads if self.bags is None else gather_rows(self.grads, self.bags)

    def summed(self) -> tuple[Tensor, Tensor]:
        """The distinct rows (U,), and the sum of each one's gradients (U, D).

        Repeats are summed in the order of ``indices``, whatever the number of threads.
        """
        ordered, order = torch.sort(self.indices, stable=True)
        rows, counts = torch.unique_consecutive(ordered, return_counts=True)
        bags = order if self.bags is None else self.bags[order]
        starts = counts.cumsum(0) - counts
        return rows, F.embedding_bag(bags, self.grads, starts, mode="sum")

    def part(self, number: int, of: int) -> BagGradients:
        """The gradients of the rows ``number, number + of, …``; ``of`` is a power of two."""
        mine = (self.indices.bitwise_and(of - 1) == number).nonzero().squeeze(1)
        bags = mine if self.bags is None else self.bags[mine]
        return BagGradients(self.indices[mine], bags, self.grads)


Action: TypeAlias = Callable[[BagGradients], None]
RunAll: TypeAlias = Callable[[Action, BagGradients], None]
"""Called with an action and gradients: acts on all of them, in one piece or in several."""


def run_in_turn(action: Action, gradient: BagGradients) -> None:
    """Act on the gradients in one piece, on the calling thread."""
    action(gradient)


class Lanes:
    """Splits large updates by row over threads: no two touch a row, so none waits for another.

    In sync mode the trainers wait for the update, and their cores are free.

    Args:
        most: at most so many threads; as many as there are trainers, say.
    """

    def __init__(self, most: int) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self._count = 1 << (max(1, min(most, cores)).bit_length() - 1)
        self._pool = ThreadPoolExecutor(max(1, self._count - 1), thread_name_prefix="lane")

    def __call__(self, action: Action, gradient: BagGradients) -> None:
        """A `RunAll`."""
        count = self._count if gradient.indices.numel() >= _WORTH_SPLITTING else 1
        if count == 1:
            action(gradient)
            return
        others = [
            self._pool.submit(self._act_on_part, action, gradient, number, count)
            for number in range(1, count)
        ]
        action(gradient.part(0, count))
        for other in others:
            other.result()

    @staticmethod
    def _act_on_part(action: Action, gradient: BagGradients, number: int, of: int) -> None:
        action(gradient.part(number, of))  # split here, on the part's own thread


def joined(pushes: Sequence[SlabPush], divisor: int) -> BagGradients | None:
    """Several pushes as one, divided as DDP divides; None if they hold no id."""
    parts = [
        (push.lookup, push.grads)
        for push in pushes
        if isinstance(push.lookup, SlabLookup) and push.lookup.indices.numel()
    ]
    if not parts:
        return None
    indices = torch.cat([lookup.indices for lookup, _ in parts])
    grads = torch.cat([own for _, own in parts])
    if divisor > 1:
        grads.div_(divisor)
    if all(lookup.offsets is None for lookup, _ in parts):
        return BagGradients(indices, None, grads)
    lengths = torch.cat([_lengths(lookup) for lookup, _ in parts])
    bags = torch.arange(grads.shape[0]).repeat_interleave(lengths, output_size=indices.numel())
    return BagGradients(indices, bags, grads)


def _lengths(lookup: SlabLookup) -> Tensor:
    if lookup.offsets is None:
        return torch.ones_like(lookup.indices)
    return bag_lengths(lookup.offsets, lookup.indices.numel())
