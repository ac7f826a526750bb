"""`TrainerLoop`: trains a hybrid model over batches; read `fit` and down for one step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from hybridpar.errors import InputError, SpecError
from hybridpar.messages import Pooled, TurnAnswer
from hybridpar.optim import SparseOptimizerSettings
from hybridpar.trainer.batches import Batches, to_device
from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.dense import DenseHalf
from hybridpar.trainer.model import HybridModel
from hybridpar.trainer.routing import RoutedBatch

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """What one call of :meth:`TrainerLoop.fit` did on this trainer.

    Attributes:
        steps: number of steps, all epochs together.
        first_loss: loss of the first step; NaN if there was none.
        last_loss: loss of the last step; NaN if there was none.
        epoch_losses: for each epoch, the mean of this trainer's losses; NaN if it had no batch.
        seconds: wall-clock time.
    """

    steps: int
    first_loss: float
    last_loss: float
    epoch_losses: tuple[float, ...]
    seconds: float

    @property
    def steps_per_second(self) -> float:
        """Steps a second; 0 if there was none."""
        return self.steps / self.seconds if self.seconds else 0.0


class TrainerLoop(Generic[Batch]):
    """Trains one model on one trainer, in step with the other trainers.

    Building it is collective: every trainer does, with equal specs and settings. The dense half
    starts from trainer 0's values. Sync mode: one step of n trainers changes dense and sparse
    parameters as one step of one process would on the n batches together, their losses averaged.

    Args:
        model: the model; its tables go to the servers, its parameters to ``ctx.device``.
        ctx: what the train function got.
        loss: called with (output, batch); returns a scalar tensor.
        dense_optimizer: called with the model's trainable parameters; returns their optimizer. Not
            called if there are none.
        sparse_optimizer: settings from :mod:`hybridpar.optim`.

    Raises:
        SpecError: if an optimizer is of the wrong kind, or the trainers' specs differ.

    Example:
        >>> def train(ctx):
        ...     loop = TrainerLoop(
        ...         Recommender(), ctx,
        ...         loss=lambda output, batch: F.cross_entropy(output, batch.label),
        ...         dense_optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
        ...         sparse_optimizer=hybridpar.optim.RowWiseAdagrad(lr=0.05),
        ...     )
        ...     return loop.fit(my_batches(ctx.rank, ctx.num_trainers), epochs=3)
    """

    def __init__(
        self,
        model: HybridModel[Batch],
        ctx: TrainerContext,
        *,
        loss: Callable[[Tensor, Batch], Tensor],
        dense_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        sparse_optimizer: SparseOptimizerSettings,
    ) -> None:
        self.model = model.to(ctx.device)
        self.sparse_optimizer = model.connect(ctx, sparse_optimizer)
        self.dense_optimizer = _dense_optimizer(model, dense_optimizer)
        self._ctx = ctx
        self._loss = loss
        self._dense = DenseHalf(model, ctx, self.dense_optimizer)
        self._everyone = tuple(range(ctx.num_trainers))
        self._epochs = 0  # passes over the data in this loop's life

    def fit(
        self, batches: Iterable[Batch] | Callable[[int], Iterable[Batch]], *, epochs: int = 1
    ) -> FitResult:
        """Train for some passes over the batches.

        The trainers may have different numbers of batches: those that have one go on, averaging
        over themselves, and every batch is used once. At the end of each epoch all trainers have
        the same model again.

        Args:
            batches: this trainer's batches: any iterable. ``forward`` and the loss get each with
                its tensors on ``ctx.device``. A list or DataLoader is gone through
                again in every epoch, and a DataLoader's sampler told the epoch. A one-shot
                iterator, such as a generator, is kept in memory for the epochs after the first;
                for data too large for that give a function that returns an epoch's iterable. It
                is called with the number of epochs that this loop has done before.
            epochs: how many passes.

        Raises:
            InputError: if a batch is refused, or the loss is no scalar.
        """
        started = time.perf_counter()
        progress = _Progress()
        source = Batches(batches, epochs)
        self.model.train()
        for _ in range(epochs):
            progress.begin_epoch()
            self._fit_epoch(source.epoch(self._epochs), progress)
            self._epochs += 1
        return progress.result(time.perf_counter() - started)

    def _fit_epoch(self, stream: Iterator[Batch], progress: _Progress) -> None:
        batch = next(stream, None)
        routed = self._route(batch, ahead=0)
        pooled, answer = self.model.connected.open_epoch(routed)
        while batch is not None and routed is not None:
            following = next(stream, None)
            routed_next = self._route(following, ahead=1)
            embeddings = self.model.embed(routed, pooled)
            loss = self._step(batch, embeddings, answer.active)
            pooled, answer = self._update(routed_next)
            progress.add(loss)
            batch, routed = following, routed_next
        self._end_epoch(answer)

    def _route(self, batch: Batch | None, *, ahead: int) -> RoutedBatch | None:
        if batch is None:
            return None
        return self.model.connected.route(self.model.sparse_inputs(batch), ahead)

    def _step(self, batch: Batch, embeddings: dict[str, Tensor], active: tuple[int, ...]) -> Tensor:
        """Forward, loss and backward; DDP averages the dense gradients on the way."""
        if self._ctx.device.type != "cpu":
            batch = to_device(batch, self._ctx.device)
        output = self._dense.over(active)(embeddings, batch)
        loss = self._loss(output, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(
                f"The loss on {self._ctx.name} (step {self._ctx.step}) is of {got}. Return a "
                "scalar tensor, such as loss.mean()."
            )
        if self.dense_optimizer is not None:
            self.dense_optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _update(self, following: RoutedBatch | None) -> tuple[list[Pooled], TurnAnswer]:
        """Both halves step; the same call brings the rows that the next batch needs."""
        if self.dense_optimizer is not None:
            self.dense_optimizer.step()
        return self.sparse_optimizer.push(following, more=following is not None)

    def _end_epoch(self, last: TurnAnswer) -> None:
        """After an epoch that some trainers left early, give them the model of one that stayed."""
        if last.joined == self._everyone and not last.active:
            return
        stayed = self.model.connected.close_epoch()
        if stayed != self._everyone:
            self._dense.copy_from(stayed[0])


class _Progress:
    """Counts steps and sums losses without keeping one number a step."""

    def __init__(self) -> None:
        self._steps = 0
        self._first: Tensor | None = None
        self._last: Tensor | None = None
        self._sums: list[Tensor | None] = []
        self._counts: list[int] = []

    def begin_epoch(self) -> None:
        self._sums.append(None)
        self._counts.append(0)

    def add(self, loss: Tensor) -> None:
        self._steps += 1
        self._first = loss if self._first is None else self._first
        self._last = loss
        total = self._sums[-1]
        self._sums[-1] = loss.double() if total is None else total + loss
        self._counts[-1] += 1

    def result(self, seconds: float) -> FitResult:
        return FitResult(
            steps=self._steps,
            first_loss=_value(self._first, 1),
            last_loss=_value(self._last, 1),
            epoch_losses=tuple(map(_value, self._sums, self._counts)),
            seconds=seconds,
        )


def _value(total: Tensor | None, count: int) -> float:
    return float("nan") if total is None else float(total) / count


def _dense_optimizer(
    model: nn.Module, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> torch.optim.Optimizer | None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        return None
    optimizer = make(parameters) if callable(make) else make
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SpecError(
            f"dense_optimizer gave {optimizer!r}. Give a function of the parameters that returns "
            "a torch optimizer: lambda params: torch.optim.SGD(params, lr=0.1)."
        )
    return optimizer
