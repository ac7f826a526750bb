"""`Metric`: a number over all samples of all trainers; `Mean`: one that is a weighted mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.errors import InputError, SpecError
from hybridpar.metrics.joining import joined, several


class Metric(ABC):
    """A number over all samples of all trainers. Subclass it for one of your own.

    Attributes:
        sums: states that are added up over the trainers: float64 tensors on the CPU, by name.
        rows: states with a row a sample, which are put one after another.
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
        """The metric over the samples taken in; NaN if they do not define it."""

    def synchronise(self) -> None:
        """Take in the other trainers' samples. Every trainer calls it, or nothing is distributed.

        Call :meth:`reset` before the next :meth:`update`: a second call would count twice.
        """
        if several():
            for name in sorted(self.sums):
                dist.all_reduce(self.sums[name])
            for name in sorted(self.rows):
                self.rows[name] = torch.cat(joined(self.rows[name]))

    def results(self, name: str) -> dict[str, float]:
        """What :meth:`TrainerLoop.evaluate` reports of a metric that it knows by a name."""
        return {name: self.compute()}


class Mean(Metric):
    """Weighted mean over samples of what a subclass says of each."""

    def reset(self) -> None:
        """Forget all samples."""
        self.sums = {"total": zero(), "weight": zero()}

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Take in samples: predictions (B, …), target (B, …), weights (B,)."""
        values = column("values", self.values(predictions.detach(), target.detach()))
        weight = sample_weights(weights, len(values))
        self.sums["total"] += (values * weight).sum()
        self.sums["weight"] += weight.sum()

    @abstractmethod
    def values(self, predictions: Tensor, target: Tensor) -> Tensor:
        """One value a sample: (B,)."""

    def compute(self) -> float:
        """The mean; NaN without samples."""
        return float(self.sums["total"] / self.sums["weight"])


def zero() -> Tensor:
    """A sum of nothing."""
    return torch.zeros((), dtype=torch.float64)


def column(what: str, values: Tensor, size: int | None = None) -> Tensor:
    """(B,) values, as float64 on the CPU.

    Raises:
        InputError: if they are not one a sample.
    """
    if values.ndim != 1 or (size is not None and len(values) != size):
        wanted = "(B,)" if size is None else f"({size},)"
        raise InputError(
            f"A metric got {what} of shape {tuple(values.shape)}. Give one a sample: {wanted}."
        )
    return values.detach().to("cpu", torch.float64)


def pair(predictions: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Predictions and targets, each (B,), as float64 on the CPU."""
    scores = column("predictions", predictions)
    return scores, column("targets", target, len(scores))


def sample_weights(weights: Tensor | None, size: int) -> Tensor:
    """(B,) float64: the weights given, or ones."""
    if weights is None:
        return torch.ones(size, dtype=torch.float64)
    return column("weights", weights, size)


def check_at_least(who: object, name: str, value: Any, least: int) -> None:
    """Refuse a setting that is no whole number, or too small."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SpecError(
            f"{type(who).__name__} got {name}={value!r}. Give a whole number of at least {least}."
        )
