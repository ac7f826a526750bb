"""Metrics against plain formulas, scikit-learn and torchmetrics, and split over trainers."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from torch import Tensor

import hybridpar as hp
import measured
from hybridpar import metrics as m

SAMPLES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1), st.integers(1, 3)), max_size=20)


def in_parts(metric: m.Metric, columns: tuple[Tensor, ...], size: int) -> float:
    for start in range(0, len(columns[0]), size):
        metric.update(*(column[start : start + size] for column in columns))
    return metric.compute()


def same(ours: float, theirs: float, rel: float = 1e-9) -> None:
    assert ours == pytest.approx(float(theirs), rel=rel, abs=1e-12, nan_ok=True)


@settings(max_examples=50)
@given(SAMPLES, st.integers(1, 7), st.integers(1, 9))
def test_auc_with_ties_weights_one_class_or_nothing(
    rows: list[tuple[int, int, int]], size: int, bins: int
) -> None:
    columns = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).unbind(1)
    scores, labels, weights = columns
    if len(set(labels.tolist())) < 2:
        expected = math.nan
    else:
        expected = sk.roc_auc_score(labels, scores, sample_weight=weights)
    same(in_parts(m.AUC(), columns, size), expected)
    binned = m.BinnedAUC(bins, low=0, high=5)
    approximate = in_parts(binned, columns, size)
    assert math.isnan(approximate) == math.isnan(expected)
    if not math.isnan(expected):
        assert abs(approximate - expected) <= binned.error_bound() + 1e-12
        same(in_parts(m.BinnedAUC(5, low=0, high=5), columns, size), expected)


def test_a_fine_binned_auc_is_close() -> None:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (20_000,), generator=draw)
    scores = (torch.randn(20_000, generator=draw) + labels).sigmoid()
    exact, binned = m.AUC(), m.BinnedAUC()
    for metric in (exact, binned):
        metric.update(scores, labels)
    assert abs(exact.compute() - binned.compute()) <= binned.error_bound() < 1e-4
    nan = torch.tensor([math.nan, 1.0]), torch.tensor([0, 1])
    for metric in (exact, binned):
        metric.update(*nan)
        assert math.isnan(metric.compute())


PROBABILITIES = st.lists(
    st.tuples(st.floats(0.001, 0.999), st.integers(0, 1), st.floats(0.1, 3)), max_size=20
)


@settings(max_examples=50)
@given(PROBABILITIES, st.integers(1, 7))
def test_means_equal_scikit_learns(rows: list[tuple[float, int, float]], size: int) -> None:
    columns = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).unbind(1)
    p, y, w = columns
    if not rows:
        for kind in measured.OWN.values():
            assert math.isnan(kind().compute())
        return
    loss = sk.log_loss(y, p, sample_weight=w, labels=[0, 1])
    rate = float((w * y).sum() / w.sum())
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate) if 0 < rate < 1 else 0
    logits = (p.logit(), y, w)
    same(in_parts(m.LogLoss(), columns, size), loss)
    same(in_parts(m.LogLoss(logits=True), logits, size), loss)
    ne = loss / entropy if entropy else math.nan
    same(in_parts(m.NormalizedEntropy(), columns, size), ne, rel=1e-6)
    sums = float((w * p).sum()), float((w * y).sum())
    for metric, given_ in ((m.Calibration(), columns), (m.Calibration(logits=True), logits)):
        same(in_parts(metric, given_, size), sums[0] / sums[1] if sums[1] else math.nan)
    same(in_parts(m.MAE(), columns, size), sk.mean_absolute_error(y, p, sample_weight=w))
    same(in_parts(m.RMSE(), columns, size), sk.root_mean_squared_error(y, p, sample_weight=w))
    accuracy = sk.accuracy_score(y, p > 0.5, sample_weight=w)
    same(in_parts(m.Accuracy(), columns, size), accuracy)
    two = torch.stack([1 - p, p], 1), y.long(), w
    ties = (p == 0.5).any()
    assert ties or in_parts(m.Accuracy(), two, size) == pytest.approx(accuracy)


RANKED = st.integers(1, 6).flatmap(
    lambda width: st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=width, max_size=width),
            st.lists(st.integers(0, 2), min_size=width, max_size=width),
        ),
        min_size=1,
        max_size=3,
    )
)


def over_all_orders(scores: list[int], relevance: list[int], k: int) -> tuple[float, float]:
    """Recall and hit rate, the mean over all orders of candidates with equal scores."""
    recalls, hits = [], []
    for order in itertools.permutations(range(len(scores))):
        if any(scores[a] < scores[b] for a, b in itertools.pairwise(order)):
            continue
        found = sum(relevance[place] > 0 for place in order[:k])
        recalls.append(found / max(1, sum(value > 0 for value in relevance)))
        hits.append(float(found > 0))
    return sum(recalls) / len(recalls), sum(hits) / len(hits)


@settings(max_examples=50)
@given(RANKED, st.integers(1, 7))
def test_ranking_is_the_mean_over_all_orders_of_ties(
    rows: list[tuple[list[int], list[int]]], k: int
) -> None:
    scores, relevance = (torch.tensor(part) for part in zip(*rows, strict=True))
    expected = [over_all_orders(*row, k) for row in rows]
    for number, kind in enumerate((m.Recall, m.HitRate)):
        ours = in_parts(kind(k), (scores.float(), relevance), 2)
        same(ours, sum(pair[number] for pair in expected) / len(rows), rel=1e-6)
    if scores.shape[1] > 1:
        same(in_parts(m.NDCG(k), (scores.float(), relevance), 2),
             sk.ndcg_score(relevance, scores, k=k), rel=1e-6)  # fmt: skip
    some = [pair for pair, (_, wanted) in zip(expected, rows, strict=True) if any(wanted)]
    ours = in_parts(m.Recall(k, skip_empty=True), (scores.float(), relevance), 2)
    same(ours, sum(pair[0] for pair in some) / len(some) if some else math.nan, rel=1e-6)


def test_ranking_equals_torchmetrics_where_nothing_ties() -> None:
    from torchmetrics import retrieval

    draw = torch.Generator().manual_seed(1)
    scores = torch.rand(6, 9, generator=draw)
    relevance = torch.randint(2, (6, 9), generator=draw)
    relevance[2] = 0
    indexes = torch.arange(6)[:, None].expand(6, 9)
    kinds = {
        m.Recall: retrieval.RetrievalRecall,
        m.HitRate: retrieval.RetrievalHitRate,
        m.NDCG: retrieval.RetrievalNormalizedDCG,
    }
    for kind, theirs in kinds.items():
        for empty in ("neg", "skip"):
            wanted = theirs(top_k=3, empty_target_action=empty)
            wanted.update(scores.flatten(), relevance.flatten(), indexes.flatten())
            ours = kind(3, skip_empty=empty == "skip")
            same(in_parts(ours, (scores, relevance), 4), wanted.compute(), rel=1e-6)


def test_ranking_of_classes() -> None:
    scores = torch.tensor([[0.9, 0.5, 0.1], [0.9, 0.5, 0.1], [1.0, 1.0, 1.0]])
    target, weights = torch.tensor([1, 2, 0]), torch.tensor([1.0, 1.0, 3.0])
    for kind in (m.Recall, m.HitRate):
        same(in_parts(kind(2), (scores, target), 3), (1 + 0 + 2 / 3) / 3)
        same(in_parts(kind(2), (scores, target, weights), 3), (1 + 0 + 2) / 5)
    same(in_parts(m.NDCG(2), (scores[:2], target[:2]), 3), 1 / math.log2(3) / 2)
    nan = torch.tensor([[math.nan, 1.0]]), torch.tensor([1])
    assert math.isnan(in_parts(m.Recall(1), nan, 1))


@pytest.mark.parametrize("trainers", [2, 3])
def test_trainers_with_uneven_batches_get_what_one_gets(trainers: int) -> None:
    every = [batch for rank in range(trainers) for batch in measured.batches(rank)]
    expected = {}
    for name, kind in measured.OWN.items():
        metric = kind()
        for batch in every:
            metric.update(*batch)
        expected[name] = metric.compute()
    outcomes = hp.launch(measured.own_metrics, roles=hp.Roles(trainers=trainers))
    for found in outcomes:
        assert found == outcomes[0]
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("trainers", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_torchmetrics_on_trainers_with_uneven_batches(trainers: int) -> None:
    expected: dict[str, float] = {}
    for name, (metric, _) in measured.torch_metrics().items():
        assert math.isnan(next(iter(metric.results(name).values())))
        for rank in range(trainers):
            for batch in measured.batches(rank):
                measured.feed(metric, name, batch)
        expected |= metric.results(name)
    assert {"several/0", "several/1"} < expected.keys()
    outcomes = hp.launch(measured.wrapped_metrics, roles=hp.Roles(trainers=trainers))
    for found in outcomes:
        assert found == outcomes[0]
        assert found == pytest.approx(expected, rel=1e-5)


B, T = torch.ones(3), torch.ones(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("metric", "given_", "message"),
    [
        (m.AUC(), (torch.ones(3, 1), T), r"predictions of shape \(3, 1\). Give one a sample"),
        (m.AUC(), (B, T[:2]), r"targets of shape \(2,\). Give one a sample: \(3,\)"),
        (m.AUC(), (B, T, torch.ones(3, 1)), r"weights of shape \(3, 1\)"),
        (m.AUC(), (B, -T), "AUC got a label -1. Give 0 or 1"),
        (m.LogLoss(), (2 * B, T), "predictions with 2, .*logits=True"),
        (m.NormalizedEntropy(), (B, 2 * T), "targets with 2"),
        (m.Accuracy(), (torch.ones(3, 4), torch.ones(3, 4)), r"Accuracy got .* classes \(B,\)"),
        (m.Recall(2), (B, T), r"Recall got scores \(3,\) .* Give \(B, C\)"),
        (m.NDCG(2), (torch.ones(3, 4), B), "classes"),
        (m.HitRate(2), (torch.ones(3, 4), 4 * T), r"a class outside \[0, 4\)"),
    ],
)
def test_what_no_metric_can_take_is_refused(
    metric: m.Metric, given_: tuple[Tensor, ...], message: str
) -> None:
    with pytest.raises(hp.InputError, match=message):
        metric.update(*given_)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: m.Recall(0), "Recall got k=0"),
        (lambda: m.BinnedAUC(0), "bins=0"),
        (lambda: m.BinnedAUC(low=1.0), "low=1.0 and high=1.0"),
        (lambda: m.TorchMetric(m.AUC()), "TorchMetric got a AUC. Give a metric of torchmetrics"),
        (lambda: m.TorchMetric(collection()), "Give each of its metrics a name"),
    ],
)
def test_settings_of_metrics_are_checked(make, message: str) -> None:
    with pytest.raises(hp.SpecError, match=message):
        make()


def collection() -> object:
    import torchmetrics

    return torchmetrics.MetricCollection([torchmetrics.MeanSquaredError()])


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(hp.SpecError, match=r"pip install 'hybridpar\[metrics\]'"):
        m.TorchMetric(object())
