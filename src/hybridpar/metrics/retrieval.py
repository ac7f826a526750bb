"""How far up the right candidates are ranked: recall, hit rate and NDCG at k.

Shapes: B queries (users, say), C candidates of each.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpar.errors import InputError
from hybridpar.metrics.metric import Mean, check_at_least


class Top(NamedTuple):
    """Which candidates are among the first k, where equal scores come in any order.

    Attributes:
        k: how many there are, no more than candidates.
        above: (B, C) whether a candidate is for certain among the first k.
        tied: (B, C) whether it has the score at the end of them, of which only some find room.
        room: (B,) how many of those.
    """

    k: int
    above: Tensor
    tied: Tensor
    room: Tensor

    @classmethod
    def of(cls, scores: Tensor, k: int) -> Top:
        """The first k of (B, C) scores."""
        k = min(k, scores.shape[1])
        last = scores.topk(k).values[:, -1:]
        above = scores > last
        return cls(k, above, scores == last, k - above.sum(1))


class _AtK(Mean):
    """Mean over queries of what the first k candidates are worth.

    Args:
        k: how many candidates count.
        skip_empty: whether queries without a relevant candidate are left out; else they count 0.

    Raises:
        SpecError: if k is no number of candidates.
    """

    def __init__(self, k: int, *, skip_empty: bool = False) -> None:
        check_at_least(self, "k", k, 1)
        self.k = k
        self.skip_empty = skip_empty
        super().__init__()

    def update(self, predictions: Tensor, target: Tensor, weights: Tensor | None = None) -> None:
        """Take in queries: scores (B, C), target (B, C) or (B,), weights (B,)."""
        relevance = _relevance(self, predictions, target)
        if self.skip_empty:
            some = (relevance > 0).any(1)
            predictions, relevance = predictions[some], relevance[some]
            weights = None if weights is None else weights[some.to(weights.device)]
        super().update(predictions, relevance, weights)

    def values(self, predictions: Tensor, target: Tensor) -> Tensor:
        """The worth of each query; NaN if it has a score that is NaN."""
        if not len(predictions):
            return predictions.new_zeros(0)
        worth = self.worth(predictions, target.double(), Top.of(predictions, self.k))
        return torch.where(predictions.isnan().any(1), torch.nan, worth)

    @abstractmethod
    def worth(self, scores: Tensor, relevance: Tensor, top: Top) -> Tensor:
        """(B,) float64, from scores (B, C) and relevance (B, C) float64."""


class Recall(_AtK):
    """Recall@k: the share of a query's relevant candidates that are among the first k.

    Predictions are scores (B, C); targets (B, C), above 0 where relevant, or classes (B,), the one
    relevant candidate of each query. Candidates with equal scores count as in any order: what they
    add is the mean over all orders. Arguments as for :class:`NDCG`.

    Example:
        >>> recall = Recall(2)
        >>> scores = torch.tensor([[0.9, 0.8, 0.1], [0.3, 0.2, 0.1]])
        >>> recall.update(scores, torch.tensor([[0, 1, 1], [1, 0, 0]]))
        >>> recall.compute()
        0.75
    """

    def worth(self, scores: Tensor, relevance: Tensor, top: Top) -> Tensor:  # noqa: ARG002
        """The shares."""
        relevant = (relevance > 0).double()
        certain = (relevant * top.above).sum(1)
        perhaps = (relevant * top.tied).sum(1) * top.room / top.tied.sum(1)
        return _over(certain + perhaps, relevant.sum(1))


class HitRate(_AtK):
    """HitRate@k: the share of queries with a relevant candidate among the first k.

    Shapes and ties as for :class:`Recall`, with which it agrees where a query has one relevant
    candidate; arguments as for :class:`NDCG`.
    """

    def worth(self, scores: Tensor, relevance: Tensor, top: Top) -> Tensor:  # noqa: ARG002
        """1 for a hit; for one that hangs on the order of equal scores, its probability."""
        relevant = relevance > 0
        certain = (relevant & top.above).any(1)
        tied, room = top.tied.sum(1), top.room
        others = tied - (relevant & top.tied).sum(1)
        # All of the room goes to others in C(others, room) of C(tied, room) cases.
        misses = (_log_binomial(others, room) - _log_binomial(tied, room)).exp()
        return torch.where(certain, 1.0, torch.where(others < room, 1.0, 1.0 - misses))


class NDCG(_AtK):
    """NDCG@k: Σ relevance / log2(1 + rank) over the first k, over the greatest sum there could be.

    Järvelin and Kekäläinen, "Cumulated gain-based evaluation of IR techniques", 2002, with the
    relevance itself as the gain. Predictions are scores (B, C); targets (B, C), relevance from 0
    up, or classes (B,), the one relevant candidate of each query. Candidates with equal scores
    count as in any order: each has the mean gain of them all.

    Args:
        k: how many candidates count; all, if there are not so many.
        skip_empty: whether queries without a relevant candidate are left out; else they count 0.

    Raises:
        SpecError: if k is no whole number of at least 1.
    """

    def worth(self, scores: Tensor, relevance: Tensor, top: Top) -> Tensor:
        """The ratios."""
        places = torch.arange(top.k, dtype=torch.float64, device=scores.device)
        discounts = 1 / torch.log2(places + 2)
        ranked, order = scores.topk(top.k)
        gains = _levelled(ranked, relevance.gather(1, order))
        # The scores at the end are shared with candidates that found no room.
        mean = (relevance * top.tied).sum(1) / top.tied.sum(1)
        gains = torch.where(ranked == ranked[:, -1:], mean[:, None], gains)
        ideal = relevance.topk(top.k).values
        return _over((gains * discounts).sum(1), (ideal * discounts).sum(1))


def _levelled(ranked: Tensor, gains: Tensor) -> Tensor:
    """Gains of ranked candidates (B, k), each the mean over those with an equal score."""
    differs = ranked[:, 1:] != ranked[:, :-1]
    level = torch.nn.functional.pad(differs.cumsum(1), (1, 0))
    sums = torch.zeros_like(gains).scatter_add_(1, level, gains)
    counts = torch.zeros_like(gains).scatter_add_(1, level, torch.ones_like(gains))
    return (sums / counts).gather(1, level)


def _log_binomial(n: Tensor, k: Tensor) -> Tensor:
    """Log C(n, k); NaN where n < k."""
    n, k = n.double(), k.double()
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


def _over(value: Tensor, most: Tensor) -> Tensor:
    """A share; 0 where there is nothing to share."""
    return torch.where(most > 0, value / most, 0.0)


def _relevance(who: Mean, scores: Tensor, target: Tensor) -> Tensor:
    """(B, C), on the scores' device."""
    target = target.to(scores.device)
    if scores.ndim == 2 and scores.shape[1] and target.shape == scores.shape:
        return target
    whole = not target.is_floating_point() and target.dtype != torch.bool
    if scores.ndim != 2 or target.shape != scores.shape[:1] or not whole:
        raise InputError(
            f"{type(who).__name__} got scores {tuple(scores.shape)} and targets "
            f"{tuple(target.shape)} of {target.dtype}. Give (B, C) and (B, C), or (B, C) and "
            "classes (B,)."
        )
    if ((target < 0) | (target >= scores.shape[1])).any():
        raise InputError(
            f"{type(who).__name__} got a class outside [0, {scores.shape[1]}), as many as there "
            "are scores."
        )
    return torch.zeros_like(scores, dtype=torch.float32).scatter_(1, target[:, None].long(), 1.0)
