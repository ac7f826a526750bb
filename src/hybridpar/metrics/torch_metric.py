"""`TorchMetric`: any torchmetrics metric, reduced over the trainers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridpar.errors import SpecError
from hybridpar.metrics.joining import joined_objects, several
from hybridpar.metrics.metric import Metric


class TorchMetric(Metric):
    """A metric of the package torchmetrics. Needs ``pip install 'hybridpar[metrics]'``.

    Its states are reduced as it declares (``dist_reduce_fx``), but all of a trainer's at once: so
    trainers may have seen different numbers of batches, or none. (torchmetrics' own way gathers the
    tensors of a list one by one, and hangs if the lists differ in length.)

    A metric of several values is reported as ``name/0``, ``name/1`` …, a dict of them as
    ``name/key``.

    Args:
        metric: the metric. What ``inputs`` of :meth:`TrainerLoop.evaluate` returns goes to its
            ``update``, on the metric's device.

    Raises:
        SpecError: if torchmetrics is not installed, or this is none of its metrics.

    Example:
        >>> def train(ctx):
        ...     metrics = {"auroc": TorchMetric(torchmetrics.classification.BinaryAUROC())}
        ...     return loop.evaluate(batches, metrics=metrics, inputs=lambda out, b: (out, b.label))
    """

    def __init__(self, metric: Any) -> None:
        try:
            import torchmetrics
        except ImportError as error:
            raise SpecError(
                "TorchMetric needs torchmetrics: pip install 'hybridpar[metrics]'."
            ) from error
        if isinstance(metric, torchmetrics.MetricCollection):
            raise SpecError(
                "TorchMetric got a MetricCollection. Give each of its metrics a name: "
                "metrics={name: TorchMetric(metric) for name, metric in collection.items()}."
            )
        if not isinstance(metric, torchmetrics.Metric):
            raise SpecError(
                f"TorchMetric got a {type(metric).__name__}. Give a metric of torchmetrics, such "
                "as torchmetrics.classification.BinaryAUROC()."
            )
        self._metric: Any = metric
        self._all: list[Any] = [m for m in metric.modules() if isinstance(m, torchmetrics.Metric)]
        super().__init__()

    def reset(self) -> None:
        """Forget all samples."""
        self._metric.reset()

    def update(self, *inputs: Any, **named: Any) -> None:
        """Take in what the metric's own ``update`` takes."""
        self._metric.update(
            *map(self._moved, inputs), **{name: self._moved(value) for name, value in named.items()}
        )

    def synchronise(self) -> None:
        """Take in the other trainers' samples."""
        if not several():
            return
        own = [(metric._update_count, _states(metric)) for metric in self._all]
        for metric, parts in zip(self._all, zip(*joined_objects(own), strict=True), strict=True):
            metric._update_count = sum(count for count, _ in parts)
            metric._computed = None
            for name, reduce in metric._reductions.items():
                states = [state[name] for _, state in parts]
                setattr(metric, name, _reduced(states, reduce, metric.device))

    def compute(self) -> float:
        """The metric, if it is one number.

        Raises:
            SpecError: if it is several.
        """
        found = self.results("")
        if list(found) != [""]:
            raise SpecError(f"{type(self._metric).__name__} has several values. Use results().")
        return found[""]

    def results(self, name: str) -> dict[str, float]:
        """All values, each a name of its own."""
        if not any(metric._update_count for metric in self._all):
            return {name: float("nan")}
        synced = [metric._to_sync for metric in self._all]
        try:
            for metric in self._all:
                metric._to_sync = False  # done here
            return dict(_flat(name, self._metric.compute()))
        finally:
            for metric, to_sync in zip(self._all, synced, strict=True):
                metric._to_sync = to_sync

    def _moved(self, value: Any) -> Any:
        return value.detach().to(self._metric.device) if isinstance(value, Tensor) else value


def _states(metric: Any) -> dict[str, Any]:
    """The metric's states: tensors, and lists of them."""
    return {name: getattr(metric, name) for name in metric._reductions}


def _reduced(states: list[Any], reduce: Any, device: Any) -> Any:
    """One state of all trainers, from each one's, as torchmetrics has it."""
    if isinstance(states[0], Tensor) and all(isinstance(state, Tensor) for state in states):
        stacked = torch.stack([state.to(device) for state in states])
        return stacked if reduce is None else reduce(stacked)
    lists = [state if isinstance(state, list) else [state] for state in states]
    every = [value.to(device) for values in lists for value in values]
    return every if reduce is None or not every else reduce(every)


def _flat(name: str, value: Any) -> list[tuple[str, float]]:
    """A metric's value as numbers, each with a name."""
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, Tensor) and value.numel() == 1:
        return [(name, float(value))]
    elif isinstance(value, (Tensor, list, tuple)):
        parts = dict(enumerate(value)).items()
    else:
        return [(name, float(value))]
    return [
        pair for key, part in parts for pair in _flat(f"{name}/{key}" if name else str(key), part)
    ]
