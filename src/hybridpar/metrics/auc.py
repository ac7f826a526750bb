"""Area under the ROC curve: exact, or in memory that does not grow."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridpar.errors import InputError, SpecError
from hybridpar.metrics.metric import Metric, check_at_least, pair, sample_weights


class AUC(Metric):
    """Area under the ROC curve, exact: P(score of a 1 > score of a 0) + ½ P(equal).

    Fawcett, "An introduction to ROC analysis", 2006. Each argument (B,): any scores; labels 0 or 1.
    Keeps every sample, 24 bytes each, in the end all trainers' on each; :class:`BinnedAUC` does
    not. NaN if either class has no weight, or a score is NaN.

    Example:
        >>> auc = AUC()
        >>> auc.update(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
        >>> auc.compute()
        0.75
    """

    def reset(self) -> None:
        """Forget all samples."""
        self.rows = {"samples": torch.empty(0, 3, dtype=torch.float64)}
        self._parts: list[Tensor] = []

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Take in samples: each argument (B,)."""
        scores, labels = _scores_and_labels(self, predictions, target)
        columns = scores, labels, sample_weights(weights, len(scores))
        self._parts.append(torch.stack(columns, 1))

    def synchronise(self) -> None:
        """Take in the other trainers' samples."""
        self._gather()
        super().synchronise()

    def compute(self) -> float:
        """The area."""
        self._gather()
        scores, labels, weight = self.rows["samples"].unbind(1)
        if scores.isnan().any():
            return float("nan")
        levels, level = torch.unique(scores, return_inverse=True)
        ones = torch.zeros_like(levels).index_add_(0, level, weight * labels)
        zeros = torch.zeros_like(levels).index_add_(0, level, weight * (1 - labels))
        return _area(ones, zeros)

    def _gather(self) -> None:
        self.rows["samples"] = torch.cat([self.rows["samples"], *self._parts])
        self._parts = []


class BinnedAUC(Metric):
    """Area under the ROC curve of scores that are rounded into bins: 16 bytes a bin, no more.

    What is lost is the order within a bin: there, a pair of a 1 and a 0 counts ½. So it is no
    further from :class:`AUC` than :meth:`error_bound` says. NaN as for AUC.

    Args:
        bins: how many of equal width.
        low: where the first begins; scores below are in it.
        high: where the last ends; scores above are in it. For logits give -15 and 15, say.

    Raises:
        SpecError: if there is no bin, or no room for any.
    """

    def __init__(self, bins: int = 10_000, *, low: float = 0.0, high: float = 1.0) -> None:
        check_at_least(self, "bins", bins, 1)
        if not low < high:
            raise SpecError(f"BinnedAUC got low={low!r} and high={high!r}. Give low < high.")
        self.bins, self.low, self.high = bins, low, high
        super().__init__()

    def reset(self) -> None:
        """Forget all samples."""
        self.sums = {
            name: torch.zeros(self.bins, dtype=torch.float64) for name in ("ones", "zeros")
        }

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Take in samples: each argument (B,)."""
        scores, labels = _scores_and_labels(self, predictions, target)
        weight = sample_weights(weights, len(scores))
        if scores.isnan().any():
            self.sums["ones"] += float("nan")
            return
        place = (scores - self.low) / (self.high - self.low) * self.bins
        bin_ = place.clamp(0, self.bins - 1).long()
        self.sums["ones"].index_add_(0, bin_, weight * labels)
        self.sums["zeros"].index_add_(0, bin_, weight * (1 - labels))

    def compute(self) -> float:
        """The area."""
        return _area(self.sums["ones"], self.sums["zeros"])

    def error_bound(self) -> float:
        """How far the exact area may be: half the share of pairs that fell into one bin."""
        ones, zeros = self.sums["ones"], self.sums["zeros"]
        return float((ones * zeros).sum() / 2 / (ones.sum() * zeros.sum()))


def _area(ones: Tensor, zeros: Tensor) -> float:
    """The area from the weights of both classes at each level of the score, lowest first."""
    below = zeros.cumsum(0) - zeros
    return float((ones * (below + zeros / 2)).sum() / (ones.sum() * zeros.sum()))


def _scores_and_labels(who: Metric, predictions: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    scores, labels = pair(predictions, target)
    wrong = labels[(labels != 0) & (labels != 1)]
    if len(wrong):
        raise InputError(f"{type(who).__name__} got a label {float(wrong[0]):g}. Give 0 or 1.")
    return scores, labels
