"""`evaluate`: the loss and metrics of a model over all trainers' batches, nothing trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.errors import InputError, SpecError
from hybridpar.metrics import Metric
from hybridpar.trainer.batches import to_device
from hybridpar.trainer.losses import total_loss
from hybridpar.trainer.steps import Steps

Batch = TypeVar("Batch")
Inputs: TypeAlias = Callable[[Any, Any], "tuple[Tensor, ...]"]
"""From (output, batch) to what metrics take: (predictions, target) or with weights as third."""


def evaluate(
    steps: Steps[Batch],
    batches: Iterable[Batch],
    metrics: Mapping[str, Metric],
    inputs: Inputs | None,
) -> dict[str, float]:
    """See `TrainerLoop.evaluate`."""
    if "loss" in metrics:
        raise SpecError("evaluate got a metric named 'loss', the loop's own. Name it otherwise.")
    if metrics and inputs is None:
        raise SpecError(
            "evaluate got metrics, but not what they take of a batch. Give inputs=lambda output, "
            "batch: (predictions, target)."
        )
    for metric in metrics.values():
        metric.reset()
    model, several = steps.model, steps.ctx.num_trainers > 1
    model._connected_exchange.settle()
    if several:
        dist.all_reduce(torch.zeros(1))  # rows stay as they are from here to the sum below
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            sums = torch.zeros(2, dtype=torch.float64)
            for batch in batches:
                sums += _of_batch(steps, to_device(batch, steps.ctx.device), metrics, inputs)
    finally:
        for module, training in modes:
            module.training = training
    if several:
        dist.all_reduce(sums)
    for metric in metrics.values():
        metric.synchronise()
    results = {"loss": float(sums[0] / sums[1])}
    return results | {name: metric.compute() for name, metric in metrics.items()}


def _of_batch(
    steps: Steps[Batch], batch: Batch, metrics: Mapping[str, Metric], inputs: Inputs | None
) -> Tensor:
    """The batch's mean loss times its samples, and its samples."""
    embeddings = steps.model.lookup(batch)
    with steps.precision.autocast():
        output = steps.model(embeddings, batch)
        loss = total_loss(steps.loss(output, batch), f"on {steps.ctx.name}, evaluated,")
    given = (output,) if inputs is None else inputs(output, batch)
    if not isinstance(given[0], Tensor) or given[0].ndim == 0:
        raise InputError(
            f"evaluate on {steps.ctx.name} cannot tell how many samples a batch has. Give "
            "inputs=lambda output, batch: (predictions, target), predictions one row a sample."
        )
    for metric in metrics.values():
        metric.update(*given)
    samples = given[0].shape[0]
    return torch.tensor([float(loss) * samples, samples], dtype=torch.float64)
