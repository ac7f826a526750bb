"""Streaming metrics whose states are summed, or joined, over the trainers.

Sums are float64. A metric that has seen no sample is NaN. Weights are one a sample, 1 if not given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.errors import InputError


class Metric(ABC):
    """A number over all samples of all trainers.

    Every state is a float64 tensor on the CPU. Those in ``sums`` are added up over trainers; those
    in ``rows`` have one row a sample, and are put one after another.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """Forget all samples."""

    @abstractmethod
    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Take in the samples of a batch."""

    @abstractmethod
    def compute(self) -> float:
        """The metric over the samples taken in."""

    def synchronise(self) -> None:
        """Take in the other trainers' samples. Every trainer calls it, or nothing is distributed.

        Call :meth:`reset` before the next :meth:`update`: a second call would count twice.
        """
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        for total in self.sums.values():
            dist.all_reduce(total)
        for name, own in self.rows.items():
            self.rows[name] = _joined(own)


class Mean(Metric):
    """Weighted mean over samples of what a subclass says of each."""

    def reset(self) -> None:
        """Forget all samples."""
        self.sums = {"total": _zero(), "weight": _zero()}

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Take in samples: predictions (B, …), target (B, …), weights (B,)."""
        values = self.values(predictions.detach().cpu().double(), target.detach().cpu())
        weight = _weights(weights, values)
        self.sums["total"] += (values * weight).sum()
        self.sums["weight"] += weight.sum()

    @abstractmethod
    def values(self, predictions: Tensor, target: Tensor) -> Tensor:
        """One value a sample: (B,) float64."""

    def compute(self) -> float:
        """The mean; NaN without samples."""
        return float(self.sums["total"] / self.sums["weight"])


class MAE(Mean):
    """Mean absolute error: mean of |prediction - target|."""

    def values(self, predictions: Tensor, target: Tensor) -> Tensor:
        """The absolute errors."""
        return (predictions - target).abs()


class RMSE(Mean):
    """Root of the mean of (prediction - target)²."""

    def values(self, predictions: Tensor, target: Tensor) -> Tensor:
        """The squared errors."""
        return (predictions - target).square()

    def compute(self) -> float:
        """The root of the mean; NaN without samples."""
        return float(super().compute() ** 0.5)


class Accuracy(Mean):
    """Share of samples told rightly.

    Args:
        threshold: predictions (B,) above it say 1. Predictions (B, C) say their greatest class.
    """

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold
        super().__init__()

    def values(self, predictions: Tensor, target: Tensor) -> Tensor:
        """1 where right, else 0."""
        if predictions.ndim == 1:
            return ((predictions > self.threshold) == (target > 0.5)).double()
        return (predictions.argmax(1) == target).double()


class LogLoss(Mean):
    """Mean of -y log p - (1 - y) log(1 - p), in nats; p are probabilities.

    Args:
        eps: probabilities are clamped to [eps, 1 - eps].
    """

    def __init__(self, eps: float = 1e-12) -> None:
        self.eps = eps
        super().__init__()

    def values(self, predictions: Tensor, target: Tensor) -> Tensor:
        """The losses."""
        p = predictions.clamp(self.eps, 1 - self.eps)
        return -(target * p.log() + (1 - target.double()) * (1 - p).log())


class Calibration(Metric):
    """Mean prediction over mean label (He et al., 2014).

    NaN or infinite if the labels sum to 0.
    """

    def reset(self) -> None:
        """Forget all samples."""
        self.sums = {"predictions": _zero(), "labels": _zero()}

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Take in samples: each argument (B,)."""
        scores = predictions.detach().cpu().double()
        weight = _weights(weights, scores)
        self.sums["predictions"] += (scores * weight).sum()
        self.sums["labels"] += (target.detach().cpu().double() * weight).sum()

    def compute(self) -> float:
        """The ratio."""
        return float(self.sums["predictions"] / self.sums["labels"])


class AUC(Metric):
    """Area under the ROC curve, exact: P(score of a 1 > score of a 0) + ½ P(equal).

    Fawcett, *An introduction to ROC analysis*, 2006. Keeps every sample. NaN if either class has
    no weight. Targets are 0 or 1.
    """

    def reset(self) -> None:
        """Forget all samples."""
        self.rows = {"samples": torch.empty(0, 3, dtype=torch.float64)}
        self._parts: list[Tensor] = []

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Take in samples: each argument (B,)."""
        scores = predictions.detach().cpu().double()
        columns = scores, target.detach().cpu().double(), _weights(weights, scores)
        self._parts.append(torch.stack(columns, 1))

    def synchronise(self) -> None:
        """Take in the other trainers' samples."""
        self._gather()
        super().synchronise()

    def compute(self) -> float:
        """The area."""
        self._gather()
        scores, target, weight = self.rows["samples"].unbind(1)
        levels, level = torch.unique(scores, return_inverse=True)
        ones = torch.zeros_like(levels).index_add_(0, level, weight * target)
        zeros = torch.zeros_like(levels).index_add_(0, level, weight * (1 - target))
        below = zeros.cumsum(0) - zeros
        return float((ones * (below + zeros / 2)).sum() / (ones.sum() * zeros.sum()))

    def _gather(self) -> None:
        self.rows["samples"] = torch.cat([self.rows["samples"], *self._parts])
        self._parts = []


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def _weights(weights: Tensor | None, values: Tensor) -> Tensor:
    if values.ndim != 1:
        raise InputError(f"A metric got {tuple(values.shape)} values. Give one a sample: (B,).")
    if weights is None:
        return torch.ones_like(values)
    if weights.shape != values.shape:
        raise InputError(
            f"A metric got weights {tuple(weights.shape)} for {len(values)} samples. Give (B,)."
        )
    return weights.detach().cpu().double()


def _joined(own: Tensor) -> Tensor:
    """Every trainer's rows, one trainer's after another's; sizes go first, for they differ."""
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    sizes[dist.get_rank()] = len(own)
    dist.all_reduce(sizes)
    padded = own.new_zeros(int(sizes.max()), *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes.tolist(), strict=True)])
