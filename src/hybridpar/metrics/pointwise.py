"""Means over samples, each looked at by itself: errors, and accuracy."""

from __future__ import annotations

from torch import Tensor

from hybridpar.errors import InputError
from hybridpar.metrics.metric import Mean, pair


class MAE(Mean):
    """Mean absolute error: mean of abs(prediction - target). Each (B,)."""

    def values(self, predictions: Tensor, target: Tensor) -> Tensor:
        """The absolute errors."""
        scores, wanted = pair(predictions, target)
        return (scores - wanted).abs()


class RMSE(Mean):
    """Root of the mean of (prediction - target)². Each (B,)."""

    def values(self, predictions: Tensor, target: Tensor) -> Tensor:
        """The squared errors."""
        scores, wanted = pair(predictions, target)
        return (scores - wanted).square()

    def compute(self) -> float:
        """The root of the mean; NaN without samples."""
        return float(super().compute() ** 0.5)


class Accuracy(Mean):
    """Share of samples told rightly.

    Args:
        threshold: predictions (B,) above it say 1, others 0; for logits give 0. Predictions (B, C)
            say the class of the greatest score, and targets are classes.

    Example:
        >>> accuracy = Accuracy()
        >>> accuracy.update(torch.tensor([0.9, 0.2, 0.6]), torch.tensor([1, 0, 0]))
        >>> round(accuracy.compute(), 3)
        0.667
    """

    def __init__(self, threshold: float = 0.5) -> None:
        self.threshold = threshold
        super().__init__()

    def values(self, predictions: Tensor, target: Tensor) -> Tensor:
        """1 where right, else 0."""
        if predictions.ndim == 1:
            scores, wanted = pair(predictions, target)
            return ((scores > self.threshold) == (wanted > 0.5)).double()
        if predictions.ndim != 2 or target.shape != predictions.shape[:1]:
            raise InputError(
                f"Accuracy got predictions {tuple(predictions.shape)} and targets "
                f"{tuple(target.shape)}. Give (B,) and (B,), or (B, C) and classes (B,)."
            )
        return predictions.argmax(1) == target
