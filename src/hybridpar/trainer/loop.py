"""`TrainerLoop`: trains a hybrid model over batches; one step of it is in `steps`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from hybridpar.callbacks.callback import Callback
from hybridpar.callbacks.chosen import chosen
from hybridpar.errors import SpecError
from hybridpar.metrics import Metric
from hybridpar.trainer.averaging import AverageBy
from hybridpar.trainer.batches import Batches
from hybridpar.trainer.checkpointing.checkpoint import Checkpoint
from hybridpar.trainer.checkpointing.saver import Saver
from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.dense import CommHook
from hybridpar.trainer.evaluation.early_stopping import EarlyStopping
from hybridpar.trainer.evaluation.evaluating import Evaluating
from hybridpar.trainer.evaluation.evaluator import Evaluator, Inputs
from hybridpar.trainer.evaluation.validation import EvalBatches, EvalSettings
from hybridpar.trainer.losses import Losses
from hybridpar.trainer.model import HybridModel
from hybridpar.trainer.observing.profile import Profiler
from hybridpar.trainer.observing.watching import Watching
from hybridpar.trainer.parts import (
    MakeSchedulers,
    built_dense_optimizer,
    built_steps,
    check_parts,
    no_schedulers,
)
from hybridpar.trainer.passes import Passes
from hybridpar.trainer.progress import FitResult, Progress
from hybridpar.trainer.samples import SampleCount
from hybridpar.trainer.settings import (
    Consistency,
    NonFinite,
    SparseSettings,
    check_epochs,
    check_loop,
)

Batch = TypeVar("Batch")
_logger = logging.getLogger("hybridpar")


class TrainerLoop(Evaluating[Batch], Generic[Batch]):
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
        average_by: who averages the dense half's gradients. ``"ddp"``: its all-reduce, while
            backward runs. ``"servers"``: in sync mode, the model's first server, in the call that
            brings the tables' gradients. ``"auto"``: a server if it can and they are small, up to
            64 KiB, where an all-reduce is all latency; else DDP.
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
        samples: called with a batch; returns how many samples it has: callbacks count them, and
            in :meth:`evaluate` the batch's loss counts as often. None takes the first dimension of
            the first tensor in the output.

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
        average_by: AverageBy = "auto",
        comm_hook: CommHook | None = None,
        checkpoint: Checkpoint | None = None,
        schedulers: MakeSchedulers = no_schedulers,
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
            average_by=average_by,
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
            "non_finite": non_finite, "average_by": average_by,
        }  # fmt: skip
        told = chosen(callbacks, progress, report)
        count = SampleCount(ctx, samples)
        self._watching = Watching(told, model, self.dense_optimizer, count, accumulate, settings)
        self._steps = built_steps(
            model,
            ctx,
            loss=self._watching.counting(loss),
            dense_optimizer=self.dense_optimizer,
            sparse_optimizer=self.sparse_optimizer,
            schedulers=schedulers,
            accumulate=accumulate,
            autocast=autocast,
            grad_scaler=grad_scaler,
            clip_grad_norm=clip_grad_norm,
            clip_grad_value=clip_grad_value,
            ddp=ddp or {},
            comm_hook=comm_hook,
            non_finite=non_finite,
            average_by=average_by,
        )
        self._checkpoint = checkpoint
        self._evaluator = Evaluator(self._steps, count)
        self._holders = self._steps.holders
        self._saver = Saver(model._connected, self._holders, self._watching.saved)
        self._passes = Passes(self._steps, self._saver, self._holders, checkpoint, self._watching)

    def fit(
        self,
        batches: Iterable[Batch] | Callable[[int], Iterable[Batch]],
        *,
        epochs: int = 1,
        profile: bool = False,
        resume: bool = False,
        eval_batches: EvalBatches[Batch] | None = None,
        eval_every: int | None = None,
        metrics: Mapping[str, Metric] | None = None,
        inputs: Inputs | None = None,
        early_stopping: EarlyStopping | None = None,
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
            eval_batches: this trainer's batches to evaluate, as :meth:`evaluate` does: an iterable
                that can be gone through again, or a function that returns one. Every trainer gives
                some; they may be empty.
            eval_every: optimizer steps between two evaluations; None evaluates at the end of every
                epoch. What falls due while a trainer has run out of batches is done at the end of
                the epoch.
            metrics: as for :meth:`evaluate`.
            inputs: as for :meth:`evaluate`.
            early_stopping: when to end training that helps no more. Checkpoints keep what it has
                seen: a resumed run stops where one that did not stop does.

        Raises:
            InputError: if a batch is refused, the loss is no scalar or has no gradient, or
                something is not finite (see ``non_finite``).
            SpecError: if ``epochs`` is no number of passes, or evaluation is asked for in a way
                that does not work or differs between trainers.
        """
        check_epochs(epochs)
        validation = self._validation(
            EvalSettings(
                batches=eval_batches,
                every=eval_every,
                metrics=metrics,
                inputs=inputs,
                stopping=early_stopping,
            )
        )
        started = time.perf_counter()
        progress = Progress()
        if resume:
            self._passes.resume(self._settings())
            validation.resumed(self._ctx.step or 0)
        source = Batches(batches, epochs)
        self.model.train()
        profiler = Profiler(self.model._connected) if profile else None
        todo = max(0, epochs - self._passes.done) if resume else epochs
        with self._watching.fitting(batches, self._passes.done, todo):
            for _ in range(todo):
                if validation.is_over:
                    break
                progress.begin_epoch()
                self._passes.run(source, progress, profiler, validation)
            self._saver.finish()
            report = profiler.report(progress.steps) if profiler else None
            staleness = self.model._connected_exchange.staleness
            seconds = time.perf_counter() - started
            result = validation.finished(progress.result(seconds, staleness, report))
            self._watching.ended(result)
        if report is not None and self._ctx.rank == 0:
            print(report)  # noqa: T201 - what was asked for
        _logger.info("%s: %d steps in %.1f s", self._ctx.name, result.steps, result.seconds)
        return result
