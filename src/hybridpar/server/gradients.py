"""The gradients of a slab's rows: the trainers' together, summed by row.

Shapes: N ids, B bags, U distinct rows among the ids, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.errors import InputError
from hybridpar.kernels import Groups, bag_numbers, grouped
from hybridpar.messages import SlabLookup, SlabPush

_CACHED_VALUES = 1 << 18  # of float32: a megabyte


class BagGradients(NamedTuple):
    """The gradient of a sum-pooled lookup, before it is expanded to rows.

    ``indices`` (N,) are rows of the slab, repeats allowed; bag ``b`` of them begins at
    ``offsets[b]`` (B,), each is a bag if that is None; and its gradient is ``grads[b]`` (B, D).
    """

    indices: Tensor
    offsets: Tensor | None
    grads: Tensor


class RowGradients(NamedTuple):
    """Gradients by row: which ids each row has, and the gradients of their bags.

    The bags are counted through all of ``grads``, each (its B, D).
    """

    groups: Groups
    grads: Sequence[Tensor]

    def sums(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The sum of each row's gradients: some rows (U,) and their sums (U, D) at a time.

        They are summed in the order in which the ids came. What is done with some rows stays in the
        cache, and little memory is held.
        """
        grads = self.grads[0] if len(self.grads) == 1 else torch.cat(list(self.grads))
        some = max(1, _CACHED_VALUES // grads.shape[1])
        for first in range(0, len(self.groups.rows), some):
            rows, starts, bags = self.groups.some(first, first + some)
            yield rows, F.embedding_bag(bags, grads, starts, mode="sum")


def by_row(gradients: Sequence[BagGradients], parts: int = 1) -> Callable[[int], RowGradients]:
    """Several gradients by row; a row's are in their order, one gradient's after another's.

    Args:
        gradients: the trainers', in rank order.
        parts: into how many parts, that have no row in common; a power of two.

    Returns:
        A function from a part's number to its gradients.
    """
    indices = torch.cat([each.indices for each in gradients])
    bags, grads = _joined_bags(gradients), [each.grads for each in gradients]
    part = grouped(indices, bags, parts=parts)
    return lambda number: RowGradients(part(number), grads)


def _joined_bags(gradients: Sequence[BagGradients]) -> Tensor | None:
    """For each id its row of the gradients joined; None if it is the one of the same number."""
    if all(offsets is None for _, offsets, _ in gradients):
        return None
    return bag_numbers([(offsets, len(ids), len(grads)) for ids, offsets, grads in gradients])


def of_bags(push: SlabPush) -> BagGradients:
    """One push's gradients."""
    lookup = push.lookup
    assert isinstance(lookup, SlabLookup)
    return BagGradients(lookup.indices, lookup.offsets, push.grads.float())


def mean(gradients: Sequence[Tensor]) -> Tensor | None:
    """The mean of the trainers' dense gradients, each (values,), in their order; None of none."""
    if not gradients:
        return None
    if len({len(each) for each in gradients}) > 1:
        raise InputError(
            "The trainers sent dense gradients of different sizes: "
            f"{', '.join(str(len(each)) for each in gradients)} values. Where not every trainer "
            'uses every parameter, give ddp={"find_unused_parameters": True}.'
        )
    total = gradients[0].clone()
    for each in gradients[1:]:
        total.add_(each)
    return total.div_(len(gradients))
