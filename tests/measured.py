"""Train functions of test_metrics. Imports no test tool."""

from __future__ import annotations

import torch
from torch import Tensor

import hybridpar as hp
from hybridpar import metrics as m

COUNTS = [3, 1, 0]  # batches, a trainer


def batches(rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Probabilities with ties, labels, weights."""
    made = []
    for number in range(COUNTS[rank]):
        draw = torch.Generator().manual_seed(10 * rank + number)
        p = torch.rand(7 + number, generator=draw).mul(20).round() / 20
        y = torch.randint(2, p.shape, generator=draw)
        made.append((p, y, torch.rand(p.shape, generator=draw)))
    return made


OWN = {
    "auc": m.AUC, "binned": m.BinnedAUC, "log_loss": m.LogLoss, "ne": m.NormalizedEntropy,
    "calibration": m.Calibration, "mae": m.MAE, "rmse": m.RMSE, "accuracy": m.Accuracy,
}  # fmt: skip


def own_metrics(ctx: hp.TrainerContext) -> dict[str, float]:
    """Each metric over all trainers' batches."""
    made = {name: kind() for name, kind in OWN.items()}
    for metric in made.values():
        for batch in batches(ctx.rank):
            metric.update(*batch)
        metric.synchronise()
    return {name: metric.compute() for name, metric in made.items()}


def torch_metrics() -> dict[str, tuple[m.TorchMetric, bool]]:
    """Metrics of torchmetrics of every kind of state; whether their third input is a group."""
    import torchmetrics as tm
    from torchmetrics import classification, regression, retrieval

    made = {
        "list": classification.BinaryAUROC(),
        "binned": classification.BinaryAUROC(thresholds=5),
        "sum": classification.BinaryAccuracy(),
        "several": classification.MulticlassAccuracy(num_classes=2, average=None),
        "stacked": regression.PearsonCorrCoef(),
        "max": tm.MaxMetric(),
        "grouped": retrieval.RetrievalNormalizedDCG(),
        "sum of two": classification.BinaryAccuracy() + regression.MeanSquaredError(),
    }
    return {name: (m.TorchMetric(metric), name == "grouped") for name, metric in made.items()}


def feed(metric: m.TorchMetric, name: str, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    p, y, w = batch
    if name == "grouped":
        metric.update(p, y, indexes=(w * 3).long())
    elif name == "max":
        metric.update(p)
    else:
        metric.update(
            (p > 0.5).long() if name == "several" else p, y.float() if name == "stacked" else y
        )


def wrapped_metrics(ctx: hp.TrainerContext) -> dict[str, float]:
    """As `own_metrics`, of torchmetrics; twice, for it must reset."""
    found: dict[str, float] = {}
    for _ in range(2):
        for name, (metric, _) in torch_metrics().items():
            metric.reset()
            for batch in batches(ctx.rank):
                feed(metric, name, batch)
            metric.synchronise()
            found |= metric.results(name)
    return found
