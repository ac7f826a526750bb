"""How good and how true predicted probabilities are: log loss, normalised entropy, calibration."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.errors import InputError
from hybridpar.metrics.metric import Mean, Metric, pair, sample_weights, zero


class LogLoss(Mean):
    """Mean of -y log p - (1 - y) log(1 - p), in nats. Each (B,); y is from 0 to 1.

    Args:
        logits: whether predictions are logits, of which p is the sigmoid.
        eps: probabilities that are not given as logits are clamped to [eps, 1 - eps].

    Example:
        >>> loss = LogLoss()
        >>> loss.update(torch.tensor([0.9, 0.2]), torch.tensor([1, 0]))
        >>> round(loss.compute(), 4)
        0.1643
    """

    def __init__(self, *, logits: bool = False, eps: float = 1e-12) -> None:
        self.logits = logits
        self.eps = eps
        super().__init__()

    def values(self, predictions: Tensor, target: Tensor) -> Tensor:
        """The losses."""
        scores, wanted = pair(predictions, target)
        _check_within("targets", wanted, "Give labels from 0 to 1.")
        if self.logits:
            return F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
        _check_probabilities(scores)
        p = scores.clamp(self.eps, 1 - self.eps)
        return -(wanted * p.log() + (1 - wanted) * (1 - p).log())


class NormalizedEntropy(LogLoss):
    """Log loss over that of always predicting the mean label; below 1 something was learnt.

    He et al., "Practical lessons from predicting clicks on ads at Facebook", ADKDD 2014. NaN if all
    labels are alike, so that there is no entropy. Arguments as for :class:`LogLoss`.
    """

    def reset(self) -> None:
        """Forget all samples."""
        super().reset()
        self.sums["labels"] = zero()

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Take in samples: each argument (B,)."""
        super().update(predictions, target, weights)
        _, wanted = pair(predictions, target)
        self.sums["labels"] += (wanted * sample_weights(weights, len(wanted))).sum()

    def compute(self) -> float:
        """The ratio of the two losses."""
        rate = self.sums["labels"] / self.sums["weight"]
        entropy = -(torch.xlogy(rate, rate) + torch.xlogy(1 - rate, 1 - rate))
        return super().compute() / float(entropy) if entropy > 0 else float("nan")


class Calibration(Metric):
    """Sum of predicted probabilities over sum of labels: how often more was promised than came.

    He et al., "Practical lessons from predicting clicks on ads at Facebook", ADKDD 2014. NaN if the
    labels sum to 0. Each argument (B,).

    Args:
        logits: whether predictions are logits.
    """

    def __init__(self, *, logits: bool = False) -> None:
        self.logits = logits
        super().__init__()

    def reset(self) -> None:
        """Forget all samples."""
        self.sums = {"predictions": zero(), "labels": zero()}

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Take in samples: each argument (B,)."""
        scores, wanted = pair(predictions, target)
        weight = sample_weights(weights, len(scores))
        if self.logits:
            scores = scores.sigmoid()
        self.sums["predictions"] += (scores * weight).sum()
        self.sums["labels"] += (wanted * weight).sum()

    def compute(self) -> float:
        """The ratio."""
        labels = self.sums["labels"]
        return float(self.sums["predictions"] / labels) if labels != 0 else float("nan")


def _check_probabilities(scores: Tensor) -> None:
    _check_within("predictions", scores, "Give probabilities, or say logits=True.")


def _check_within(what: str, values: Tensor, mend: str) -> None:
    outside = (values < 0) | (values > 1)
    if outside.any():
        value = float(values[outside][0])
        raise InputError(f"A metric got {what} with {value:g}, outside [0, 1]. {mend}")
