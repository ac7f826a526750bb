"""What every trainer has, on every trainer: tensors of different lengths, and other values."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def several() -> bool:
    """Whether there are other trainers."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def joined(own: Tensor) -> list[Tensor]:
    """Every trainer's rows, in rank order: CPU tensors alike but for their length. Collective."""
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    sizes[dist.get_rank()] = len(own)
    dist.all_reduce(sizes)  # first, for they differ
    padded = own.new_zeros(int(sizes.max()), *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return [part[:size] for part, size in zip(parts, sizes.tolist(), strict=True)]


def joined_objects(own: Any) -> list[Any]:
    """Every trainer's value, in rank order; torch's all_gather_object needs NumPy. Collective."""
    buffer = io.BytesIO()
    torch.save(own, buffer)
    parts = joined(torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8))
    return list(map(_loaded, parts))


def _loaded(part: Tensor) -> Any:
    data = bytearray(len(part))
    torch.frombuffer(data, dtype=torch.uint8).copy_(part)
    # From a process of this very job.
    return torch.load(io.BytesIO(data), weights_only=False, map_location="cpu")
