"""Bags of ids, by where each begins.

Shapes: N ids, B bags.
"""

from __future__ import annotations

import torch
from torch import Tensor


def bag_lengths(offsets: Tensor, num_indices: int) -> Tensor:
    """How many ids each bag holds, from the (B,) start offsets and N: (B,) int64."""
    ends = torch.empty_like(offsets)
    if offsets.numel():
        ends[:-1] = offsets[1:]
        ends[-1] = num_indices
    return ends.sub_(offsets)
