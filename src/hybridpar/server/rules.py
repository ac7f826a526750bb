"""The update rules: how a gradient changes the rows that it touches, and their state.

Shapes: R rows of the slab, N ids, B bags, U distinct rows among the ids, D columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from hybridpar.errors import SpecError
from hybridpar.optim import SGD, Adagrad, RowWiseAdagrad, SparseOptimizerSettings
from hybridpar.server.kernels import add_rows, gather_rows


@dataclass(frozen=True, slots=True)
class BagGradients:
    """The gradient of a sum-pooled lookup, before it is expanded to rows.

    Attributes:
        indices: (N,) int64 rows of the slab, repeats allowed.
        bags: (N,) int64, for each id the row of ``grads`` that is its gradient; None if it is
            simply the row of the same number.
        grads: (B, D) float32.
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


class Rule(ABC):
    """One optimizer at work on one slab."""

    @abstractmethod
    def update(
        self, weight: Tensor, state: Mapping[str, Tensor], gradient: BagGradients, lr: float
    ) -> None:
        """Change the touched rows of ``weight`` (R, D) and of each state (R, its width)."""


class SGDRule(Rule):
    """``row -= lr * g``. Linear in g, so repeats need not be summed first."""

    @override
    def update(
        self, weight: Tensor, state: Mapping[str, Tensor], gradient: BagGradients, lr: float
    ) -> None:
        scaled = BagGradients(gradient.indices, gradient.bags, gradient.grads * -lr)
        add_rows(weight, gradient.indices, scaled.expanded())


@dataclass(frozen=True, slots=True)
class AdagradRule(Rule):
    """``sum += g**2; row -= lr * g / (sqrt(sum) + eps)``, one sum a weight or one a row."""

    eps: float
    row_wise: bool

    @override
    def update(
        self, weight: Tensor, state: Mapping[str, Tensor], gradient: BagGradients, lr: float
    ) -> None:
        rows, grads = gradient.summed()
        squares = grads.square()
        if self.row_wise:
            squares = squares.mean(dim=1, keepdim=True)
        sums = gather_rows(state["sum"], rows).add_(squares)
        state["sum"].index_copy_(0, rows, sums)
        step = grads.mul_(-lr).div_(sums.sqrt_().add_(self.eps))
        add_rows(weight, rows, step)


def rule_for(settings: SparseOptimizerSettings) -> Rule:
    """The rule that a setting asks for.

    Raises:
        SpecError: if no rule is known for the setting.
    """
    if isinstance(settings, SGD):
        return SGDRule()
    if isinstance(settings, Adagrad):
        return AdagradRule(settings.eps, row_wise=False)
    if isinstance(settings, RowWiseAdagrad):
        return AdagradRule(settings.eps, row_wise=True)
    raise SpecError(f"No update rule for {settings!r}. Use a class of hybridpar.optim.")
