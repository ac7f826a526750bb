"""Metrics against plain formulas, and split over trainers."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridpar.metrics import AUC, MAE, RMSE, Accuracy, Calibration, LogLoss

SAMPLES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1), st.integers(1, 3)), max_size=20)


def plain_auc(rows: list[tuple[int, int, int]]) -> float:
    pairs = [(a, b) for a in rows for b in rows if a[1] == 1 and b[1] == 0]
    total = sum(a[2] * b[2] for a, b in pairs)
    won = sum(a[2] * b[2] * ((a[0] > b[0]) + (a[0] == b[0]) / 2) for a, b in pairs)
    return won / total if total else math.nan


@given(SAMPLES, st.integers(1, 7))
def test_auc_is_the_share_of_pairs_in_order(rows: list[tuple[int, int, int]], size: int) -> None:
    metric = AUC()
    for start in range(0, len(rows), size):
        metric.update(*torch.tensor(rows[start : start + size]).unbind(1))
    expected = plain_auc(rows)
    assert math.isclose(metric.compute(), expected) or math.isnan(expected)
    assert math.isnan(metric.compute()) == math.isnan(expected)


def test_means() -> None:
    p, y = torch.tensor([0.9, 0.2, 0.6]), torch.tensor([1, 0, 0])
    expected: dict[type, float] = {
        MAE: (0.1 + 0.2 + 0.6) / 3,
        RMSE: math.sqrt((0.01 + 0.04 + 0.36) / 3),
        LogLoss: -(math.log(0.9) + math.log(0.8) + math.log(0.4)) / 3,
        Accuracy: 2 / 3,
        Calibration: 1.7,
    }
    for kind, value in expected.items():
        metric = kind()
        assert math.isnan(metric.compute())
        metric.update(p[:1], y[:1])
        metric.update(p[1:], y[1:])
        assert math.isclose(metric.compute(), value, rel_tol=1e-6)


def test_accuracy_of_classes() -> None:
    metric = Accuracy()
    scores: Tensor = torch.eye(3)
    metric.update(scores, torch.tensor([0, 1, 1]), torch.tensor([1.0, 1.0, 2.0]))
    assert metric.compute() == 0.5
