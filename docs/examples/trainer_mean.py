"""The mean of a number over the trainers, for what the examples print."""

import torch
import torch.distributed as dist


def mean_over_trainers(value: float, num_trainers: int) -> float:
    """The mean of all trainers' values; every trainer calls it."""
    total = torch.tensor(value, dtype=torch.float64)
    if num_trainers > 1:
        dist.all_reduce(total)
    return float(total) / num_trainers
