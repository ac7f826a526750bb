"""`Evaluator`: the loss and metrics of a model over all trainers' batches, nothing trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridpar.errors import InputError, SpecError
from hybridpar.metrics import Metric
from hybridpar.trainer.batches import to_device
from hybridpar.trainer.checkpointing.random_states import unmoved
from hybridpar.trainer.dense import buffers_of
from hybridpar.trainer.evaluation.agreement import check_alike
from hybridpar.trainer.losses import total_loss
from hybridpar.trainer.samples import SampleCount
from hybridpar.trainer.steps import Steps

Batch = TypeVar("Batch")
Given: TypeAlias = "tuple[Any, ...]"
Inputs: TypeAlias = Callable[[Any, Any], "Given | Mapping[str, Given]"]
"""From (output, batch) to what metrics take: (predictions, target), or with weights as third; or to
that by metric."""

_TOUCH_S = 5.0  # how often a trainer that evaluates tells that it does


class Evaluator(Generic[Batch]):
    """Evaluates the model that some steps train, between two of them.

    Args:
        steps: whose model, loss and precision it is.
        samples: counts a batch's.
    """

    def __init__(self, steps: Steps[Batch], samples: SampleCount) -> None:
        self._steps = steps
        self._samples = samples
        self._ctx = steps.ctx
        self._count = 0
        self._touched = 0.0

    def evaluate(
        self, batches: Iterable[Batch], metrics: Mapping[str, Metric], inputs: Inputs | None
    ) -> dict[str, float]:
        """See `TrainerLoop.evaluate`."""
        check_metrics(metrics, inputs)
        for metric in metrics.values():
            metric.reset()
        tables = self._steps.model._connected
        with tables.stopwatch.paused(), unmoved(self._ctx.device):
            self._steps.model._connected_exchange.settle()
            # When all are here all updates are applied, and none comes before all have left.
            self._count += 1
            check_alike(tables, f"evaluation {self._count}", {"metrics": kinds_of(metrics)})
            with buffers_of(0, self._ctx, self._steps.model), _evaluating(self._steps.model):
                sums = torch.zeros(2, dtype=torch.float64)
                for batch in batches:
                    sums += self._take_in(batch, metrics, inputs)
                    self._touch()
            self._wait_for_all()
            if self._ctx.num_trainers > 1:
                dist.all_reduce(sums)
            loss, samples = sums.tolist()
            if not samples:
                raise InputError(
                    "evaluate got no batch, or none with a sample, on any trainer. Give a list, or "
                    "another iterable that is not used up."
                )
            results = {"loss": loss / samples}
            for name in sorted(metrics):
                metrics[name].synchronise()
            for name, metric in metrics.items():
                results |= metric.results(name)
        return self._of_first(results)

    def _take_in(
        self, batch: Batch, metrics: Mapping[str, Metric], inputs: Inputs | None
    ) -> Tensor:
        """The batch's mean loss times its samples, and its samples."""
        steps = self._steps
        embeddings = steps.model.lookup(batch)
        batch = to_device(batch, self._ctx.device)
        with steps.precision.autocast():
            output = steps.model(embeddings, batch)
            loss = total_loss(steps.loss(output, batch), f"on {self._ctx.name}, evaluated,")
        given = None if inputs is None else inputs(output, batch)
        for name, metric in metrics.items():
            metric.update(*self._for_metric(name, given))
        samples = self._samples.of(batch, output, given)
        if samples is None:
            raise InputError(
                f"evaluate on {self._ctx.name} cannot tell how many samples a batch has: forward "
                "returned no tensor with a row a sample. Give inputs=lambda output, batch: "
                "(predictions, target), predictions with a row a sample; or "
                "TrainerLoop(samples=lambda batch: ...)."
            )
        total = float(loss) * samples if samples else 0.0  # of no samples the mean is NaN
        return torch.tensor([total, samples], dtype=torch.float64)

    def _for_metric(self, name: str, given: object) -> Given:
        """What ``inputs`` returned for a metric."""
        if isinstance(given, Mapping):
            if name not in given:
                raise InputError(
                    f"inputs on {self._ctx.name} returned nothing for metric '{name}', only for "
                    f"{', '.join(map(repr, given))}."
                )
            given = given[name]
        if not isinstance(given, (tuple, list)):
            raise InputError(
                f"inputs on {self._ctx.name} returned a {type(given).__name__}. Return "
                "(predictions, target) or (predictions, target, weights)."
            )
        return tuple(given)

    def _of_first(self, results: dict[str, float]) -> dict[str, float]:
        """Trainer 0's results: on another kind of machine the last bit might differ."""
        values = torch.tensor(list(results.values()), dtype=torch.float64)
        if self._ctx.num_trainers > 1:
            dist.broadcast(values, src=0)
        return dict(zip(results, values.tolist(), strict=True))

    def _touch(self) -> None:
        """Tell trainers that have evaluated their batches that this one is still at it."""
        tables = self._steps.model._connected
        if self._ctx.num_trainers > 1 and time.monotonic() - self._touched > _TOUCH_S:
            self._touched = time.monotonic()
            tables.master.call("touch", tables.model_id)

    def _wait_for_all(self) -> None:
        """Wait until every trainer has evaluated its batches, however long that takes."""
        tables = self._steps.model._connected
        if self._ctx.num_trainers > 1:
            where = f"the end of evaluation {self._count}"
            tables.master.send("gather", tables.model_id, self._ctx.rank, where).wait(
                patiently=True
            )


def check_metrics(metrics: object, inputs: object) -> None:
    """Refuse metrics that are none, or that nothing is said to be given to."""
    if not isinstance(metrics, Mapping) or not all(
        isinstance(metric, Metric) for metric in metrics.values()
    ):
        raise SpecError(
            f"metrics is {metrics!r}. Give a dict from names to metrics: "
            "{'auc': hybridpar.metrics.AUC()}. One of torchmetrics goes into a TorchMetric."
        )
    if "loss" in metrics:
        raise SpecError("A metric is named 'loss', as the loop's own is. Name it otherwise.")
    if metrics and not callable(inputs):
        raise SpecError(
            f"There are metrics, but inputs={inputs!r}. Say what they take of a batch: "
            "inputs=lambda output, batch: (predictions, target)."
        )


def kinds_of(metrics: Mapping[str, Metric]) -> dict[str, str]:
    """What must be alike on all trainers: the metrics, and the shapes of what they add up."""
    return {
        name: " ".join(
            [type(metric).__name__]
            + [str(tuple(state.shape)) for _, state in sorted(metric.sums.items()) if state.ndim]
        )
        for name, metric in sorted(metrics.items())
    }


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode, no gradients; afterwards every module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
