"""`TrainerLoop`: trains a hybrid model over batches; one step of it is in `steps`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from hybridpar.callbacks.callback import Callback
from hybridpar.callbacks.chosen import chosen
from hybridpar.checkpoint.folders import newest
from hybridpar.errors import SpecError
from hybridpar.trainer.amp import MixedPrecision
from hybridpar.trainer.batches import Batches
from hybridpar.trainer.checkpoint import Checkpoint, Position
from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.dense import CommHook, DenseHalf
from hybridpar.trainer.finite import FiniteCheck
from hybridpar.trainer.model import HybridModel
from hybridpar.trainer.parts import built_dense_optimizer, check_parts, checked_schedulers
from hybridpar.trainer.passes import Passes
from hybridpar.trainer.profile import Profiler
from hybridpar.trainer.progress import FitResult, Progress
from hybridpar.trainer.saver import Saver
from hybridpar.trainer.settings import (
    Consistency,
    NonFinite,
    SparseSettings,
    check_epochs,
    check_loop,
)
from hybridpar.trainer.sparse_optimizer import SparseOptimizer
from hybridpar.trainer.steps import Losses, Steps
from hybridpar.trainer.watching import Watching

Batch = TypeVar("Batch")
MakeSchedulers: TypeAlias = Callable[
    ["torch.optim.Optimizer | None", SparseOptimizer], Sequence[LRScheduler]
]
_logger = logging.getLogger("hybridpar")


def _no_schedulers(*_: object) -> Sequence[LRScheduler]:
    return ()


class TrainerLoop(Generic[Batch]):
    """Trains one model on one trainer, in step with the other trainers.

    Building it is collective: every trainer does, with equal specs and settings. The dense half
    starts from trainer 0's values. Sync mode: one step of n trainers changes dense and sparse
    parameters as one step of one process would on the n batches together, their losses averaged.

    Args:
        model: the model; its tables go to the servers, its parameters to ``ctx.device``.
        ctx: what the train function got.
        loss: called with (output, batch); returns a scalar tensor, or several by name, whose sum
            is trained on.
        dense_optimizer: called with the model's trainable parameters; returns their optimizer. Not
            called if there are none.
        sparse_optimizer: settings from :mod:`hybridpar.optim`, for every table whose spec has none
            of its own; or a mapping from tables' names to them.
        consistency: ``"sync"``, ``"async"`` or ``"bounded"``; see :meth:`HybridModel.connect`.
        staleness: for ``"bounded"``: by how many steps rows may be behind.
        scale_gradients: in async and bounded mode, divide gradients by the number of trainers.
        wire_dtype: what rows and gradients are sent as; see :meth:`HybridModel.connect`.
        accumulate: batches a step: their losses are averaged, and both halves step once.
        autocast: the dtype that forward and loss run in, such as :data:`torch.bfloat16`.
        grad_scaler: scales the loss; a step in which a gradient overflows is skipped by both
            halves.
        clip_grad_norm: the dense half's gradient is scaled down to this norm if it is above. (The
            tables' is clipped by their optimizer's settings.)
        clip_grad_value: the entries of the dense half's gradient are clamped to this size.
        ddp: keyword arguments of DistributedDataParallel, such as
            ``{"find_unused_parameters": True}`` or ``{"static_graph": True}``.
        comm_hook: called with the process group that reduces; returns the ``(state, hook)`` for
            DistributedDataParallel's ``register_comm_hook``.
        checkpoint: where and when to save; see :class:`Checkpoint`.
        schedulers: called with (dense optimizer or None, sparse optimizer); returns torch's
            learning-rate schedulers, each stepped after every optimizer step.
        non_finite: what becomes of a step in which a trainer's loss, or the gradient of a table,
            hosted module or parameter, has NaN or infinity. ``"raise"``: that trainer raises
            InputError. ``"skip"``: all trainers leave the step out, in both halves;
            ``FitResult.skipped`` counts it. ``"ignore"``: nothing is looked at, as in plain torch.
            With an enabled ``grad_scaler`` the scaler decides, whatever this says: it skips.
        callbacks: told what happens, step by step; see :mod:`hybridpar.callbacks`.
        progress: whether trainer 0 shows how far it is: a bar on a terminal (extra ``progress``),
            plain lines elsewhere. None shows it on a terminal alone.
        report: where trainer 0 writes an HTML page on each fit; see :class:`callbacks.Report`.
        samples: called with a batch; returns how many samples it has, for callbacks to count. None
            takes the first dimension of the first tensor in the output, or else in the batch.

    Raises:
        SpecError: if an optimizer is of the wrong kind, a setting is wrong, the trainers' specs
            differ, or the servers lack the memory.

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
        loss: Callable[[Any, Batch], Losses],
        dense_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        sparse_optimizer: SparseSettings = None,
        consistency: Consistency = "sync",
        staleness: int | None = None,
        scale_gradients: bool = True,
        wire_dtype: torch.dtype = torch.float32,
        accumulate: int = 1,
        autocast: torch.dtype | None = None,
        grad_scaler: GradScaler | None = None,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        ddp: Mapping[str, Any] | None = None,
        comm_hook: CommHook | None = None,
        checkpoint: Checkpoint | None = None,
        schedulers: MakeSchedulers = _no_schedulers,
        non_finite: NonFinite = "raise",
        callbacks: Sequence[Callback] = (),
        progress: bool | None = None,
        report: str | os.PathLike[str] | None = None,
        samples: Callable[[Batch], int] | None = None,
    ) -> None:
        check_loop(
            loss=loss,
            accumulate=accumulate,
            autocast=autocast,
            grad_scaler=grad_scaler,
            clip_grad_norm=clip_grad_norm,
            clip_grad_value=clip_grad_value,
            ddp=ddp,
            schedulers=schedulers,
            non_finite=non_finite,
        )
        check_parts(model, ctx)
        if accumulate > 1 and (ddp or {}).get("static_graph"):
            raise SpecError("DDP cannot accumulate with static_graph. Leave out one of the two.")
        self.model = model.to(ctx.device)
        self.dense_optimizer = built_dense_optimizer(model, dense_optimizer)
        self.sparse_optimizer = model.connect(
            ctx,
            sparse_optimizer,
            consistency=consistency,
            staleness=staleness,
            scale_gradients=scale_gradients,
            wire_dtype=wire_dtype,
        )
        self._ctx = ctx
        settings = {
            "dense optimizer": self.dense_optimizer, "sparse optimizer": sparse_optimizer,
            "consistency": consistency, "staleness": staleness, "scale_gradients": scale_gradients,
            "wire_dtype": wire_dtype, "accumulate": accumulate, "autocast": autocast, "ddp": ddp,
            "clip_grad_norm": clip_grad_norm, "clip_grad_value": clip_grad_value,
            "non_finite": non_finite,
        }  # fmt: skip
        told = chosen(callbacks, progress, report)
        self._watching = Watching(told, model, self.dense_optimizer, samples, accumulate, settings)
        precision = MixedPrecision(ctx, autocast, grad_scaler)
        self._steps = Steps(
            model=model,
            ctx=ctx,
            loss=self._watching.counting(loss),
            dense_optimizer=self.dense_optimizer,
            sparse_optimizer=self.sparse_optimizer,
            dense=DenseHalf(model, ctx, ddp or {}, comm_hook),
            precision=precision,
            finite=FiniteCheck(
                non_finite if precision.scaler is None else "ignore",
                ctx,
                model,
                self.sparse_optimizer,
                reduced_in_place=bool((ddp or {}).get("gradient_as_bucket_view")),
            ),
            schedulers=checked_schedulers(schedulers(self.dense_optimizer, self.sparse_optimizer)),
            accumulate=accumulate,
            clip_norm=clip_grad_norm,
            clip_value=clip_grad_value,
        )
        holders = {
            "model": model,
            "dense optimizer": self.dense_optimizer,
            "sparse optimizer": self.sparse_optimizer,
            "scaler": self._steps.precision.scaler,
            **{f"scheduler {n}": scheduler for n, scheduler in enumerate(self._steps.schedulers)},
        }
        self._holders = {name: holder for name, holder in holders.items() if holder is not None}
        self._everyone = tuple(range(ctx.num_trainers))
        self._checkpoint = checkpoint
        self._saver = Saver(model._connected, self._holders, self._watching.saved)
        self._passes = Passes(self._steps, self._saver, self._holders, checkpoint, self._watching)

    def fit(
        self,
        batches: Iterable[Batch] | Callable[[int], Iterable[Batch]],
        *,
        epochs: int = 1,
        profile: bool = False,
        resume: bool = False,
    ) -> FitResult:
        """Train for some passes over the batches.

        The trainers may have different numbers of batches: those that have one go on, averaging
        over themselves, and every batch is used once. At the end of each epoch all trainers have
        the same model again.

        Args:
            batches: this trainer's batches: any iterable. ``forward`` and the loss get each with
                its tensors on ``ctx.device``. A list or DataLoader is gone through again in every
                epoch, and a DataLoader's sampler told the epoch. A one-shot iterator, such as a
                generator, is kept in memory for the epochs after the first; for data too large for
                that give a function that returns an epoch's iterable. It is called with the number
                of epochs that this loop has done before.
            epochs: how many passes.
            profile: whether to take the time of every part of a step. Trainer 0 prints what came
                of it; every trainer has it in its result.
            resume: whether to go on from the newest checkpoint, if there is one: then ``epochs``
                counts from the first of all. Batches that were used are gone through again without
                being trained on; data with a ``state_dict`` and ``load_state_dict`` are put where
                they were instead.

        Raises:
            InputError: if a batch is refused, the loss is no scalar or has no gradient, or
                something is not finite (see ``non_finite``).
            SpecError: if ``epochs`` is no number of passes.
        """
        check_epochs(epochs)
        started = time.perf_counter()
        progress = Progress()
        if resume:
            self._passes.resume(self._settings())
        source = Batches(batches, epochs)
        self.model.train()
        profiler = Profiler(self.model._connected) if profile else None
        todo = max(0, epochs - self._passes.done) if resume else epochs
        with self._watching.fitting(batches, self._passes.done, todo):
            for _ in range(todo):
                progress.begin_epoch()
                self._passes.run(source, progress, profiler)
            self._saver.finish()
        report = profiler.report(progress.steps) if profiler else None
        staleness = self.model._connected_exchange.staleness
        result = progress.result(time.perf_counter() - started, staleness, report)
        self._watching.ended(result)
        if report is not None and self._ctx.rank == 0:
            print(report)  # noqa: T201 - what was asked for
        _logger.info("%s: %d steps in %.1f s", self._ctx.name, result.steps, result.seconds)
        return result

    def save(self) -> None:
        """Save now, between two calls of :meth:`fit`. Every trainer calls it.

        Raises:
            CheckpointError: if a trainer or a server cannot write; what was saved before stays.
            SpecError: if the loop was built without ``checkpoint``.
        """
        settings = self._settings()
        self.model._connected_exchange.settle()
        self._saver.save(settings, Position(self._ctx.step or 0, self._passes.done, 0))
        self._saver.finish()

    def load(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        tables: Mapping[str, str] | Sequence[str] | None = None,
        dense: bool = True,
        state: bool = True,
    ) -> int:
        """Take the model from a checkpoint. Every trainer calls it.

        The numbers of trainers and servers, and how tables are cut, may be others than they were. A
        table may have more rows than it had: new ones keep their initial values.

        Args:
            directory: a checkpoint's folder, or one with several, whose newest is taken; None takes
                the loop's own.
            tables: names of the tables and hosted modules to take; or a mapping from them to the
                names that they had in the checkpoint. None takes all.
            dense: whether to take the dense half, with its optimizer, the schedulers and so on.
            state: whether to take the state of the tables' optimizers.

        Returns:
            The optimizer steps that had been done.

        Raises:
            CheckpointError: if there is none, it is damaged, or it does not fit; all differences
                are listed.
        """
        where = self._settings().directory if directory is None else directory
        names = tables if tables is None or isinstance(tables, Mapping) else {n: n for n in tables}
        self._saver.finish()
        self.model._connected_exchange.settle()
        folder = newest(Path(where).absolute())
        position, _ = self._saver.load(folder, names, dense=dense, state=state)
        return position.step

    def _settings(self) -> Checkpoint:
        if self._checkpoint is None:
            raise SpecError(
                "The loop has no checkpoint setting. Build it with "
                "TrainerLoop(checkpoint=hybridpar.Checkpoint(directory))."
            )
        return self._checkpoint
