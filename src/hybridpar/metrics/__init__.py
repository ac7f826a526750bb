"""Streaming metrics whose states are summed, or joined, over the trainers.

What a metric computes is a function of all trainers' samples: it does not depend on how they are
cut into batches, or on which trainer has them. Sums are float64, on the CPU. Weights are one a
sample, 1 if not given. A metric that has seen no sample is NaN, and so is one that its samples do
not define.
"""

from hybridpar.metrics.auc import AUC, BinnedAUC
from hybridpar.metrics.entropy import Calibration, LogLoss, NormalizedEntropy
from hybridpar.metrics.metric import Mean, Metric
from hybridpar.metrics.pointwise import MAE, RMSE, Accuracy
from hybridpar.metrics.retrieval import NDCG, HitRate, Recall
from hybridpar.metrics.torch_metric import TorchMetric

__all__ = [
    "AUC",
    "MAE",
    "NDCG",
    "RMSE",
    "Accuracy",
    "BinnedAUC",
    "Calibration",
    "HitRate",
    "LogLoss",
    "Mean",
    "Metric",
    "NormalizedEntropy",
    "Recall",
    "TorchMetric",
]
