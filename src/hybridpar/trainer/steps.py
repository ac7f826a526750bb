"""`Steps`: one trainer's steps through an epoch; read `run` and down for one of them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from hybridpar.trainer.amp import MixedPrecision
from hybridpar.trainer.averaging import ServerAverage
from hybridpar.trainer.batches import to_device
from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.dense import DenseHalf
from hybridpar.trainer.exchange import Round
from hybridpar.trainer.finite import FiniteCheck
from hybridpar.trainer.losses import Losses, loss_to_train
from hybridpar.trainer.model import HybridModel
from hybridpar.trainer.observing.profile import Profiler
from hybridpar.trainer.observing.stopwatch import (
    BACKWARD,
    BATCHES,
    DENSE,
    FORWARD,
    PUSH,
    ROUTE,
    ROWS,
    SERVERS,
)
from hybridpar.trainer.progress import Progress
from hybridpar.trainer.routing import RoutedBatch
from hybridpar.trainer.sparse_optimizer import SparseOptimizer

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True)
class Steps(Generic[Batch]):
    """Takes the steps of an epoch, in step with the other trainers.

    Attributes:
        model: the model, connected.
        ctx: this trainer's context.
        loss: from (output, batch) to a scalar, or several by name.
        dense_optimizer: the dense half's, if it has parameters.
        sparse_optimizer: the tables'.
        dense: the dense half under DDP.
        averaging: has a server average the dense gradients; None if DDP does.
        precision: autocast and loss scaling.
        finite: what becomes of a loss or gradient that is not finite.
        schedulers: stepped after every step.
        accumulate: batches a step.
        clip_norm: the dense gradient's largest norm.
        clip_value: the dense gradient's largest entry.
    """

    model: HybridModel[Batch]
    ctx: TrainerContext
    loss: Callable[[Any, Batch], Losses]
    dense_optimizer: torch.optim.Optimizer | None
    sparse_optimizer: SparseOptimizer
    dense: DenseHalf
    averaging: ServerAverage | None
    precision: MixedPrecision
    finite: FiniteCheck
    schedulers: Sequence[LRScheduler]
    accumulate: int
    clip_norm: float | None
    clip_value: float | None

    @property
    def holders(self) -> dict[str, Any]:
        """By name, what has a ``state_dict``: what a checkpoint keeps of the dense half."""
        named = {
            "model": self.model,
            "dense optimizer": self.dense_optimizer,
            "sparse optimizer": self.sparse_optimizer,
            "scaler": self.precision.scaler,
            **{f"scheduler {n}": scheduler for n, scheduler in enumerate(self.schedulers)},
        }
        return {name: holder for name, holder in named.items() if holder is not None}

    def run(
        self,
        stream: Iterator[Batch],
        progress: Progress,
        profiler: Profiler | None,
        *,
        data_state: Callable[[], object] = lambda: None,
        begun: Callable[[], None] = lambda: None,
        after_step: Callable[[int, object, bool], bool] = lambda *_: False,
    ) -> tuple[int, ...]:
        """Take a step with all trainers that have a batch, until none has.

        Two steps' batches are looked at ahead: the next one's rows may be fetched with the
        gradients of the one under way, and the ids of the one after that are checked and split
        while the servers update.

        Args:
            stream: the batches.
            progress: counts them.
            profiler: takes the time, if any.
            data_state: where the data are, asked after each step's batches were taken.
            begun: called before the first step.
            after_step: called between two steps with the number of batches used, where the data
                were after them, and whether all trainers go on; if so, it may end the epoch for
                all, by True on every trainer.

        Returns:
            The ranks of the last step, whose dense half is the newest.
        """
        exchange = self.model._connected_exchange
        self.sparse_optimizer.zero_grad()  # of an epoch that an error cut short, say
        everyone = tuple(range(self.ctx.num_trainers))
        states: deque[object] = deque()
        used = 0
        group = self._next_group(stream, ahead=0)
        states.append(data_state())
        current = exchange.open(group[0][1] if group else None)
        following = self._next_group(stream, ahead=1)
        states.append(data_state())
        begun()
        while group:
            exchange.announce(following[0][1] if following else None)
            taking_part = current.active
            loss, pushed = self._backward(group, current)
            if self.averaging is None:
                skip = self._step_dense(taking_part, pushed=pushed)
                if not pushed:
                    self._push(skip=skip)
            elif not pushed:
                self.finite.require_gradients()
                self._push()
            after = self._next_group(stream, ahead=2)
            states.append(data_state())
            current = exchange.complete()
            self._lap(SERVERS)
            if self.averaging is not None:
                self.averaging.take(current.dense)
                skip = self._step_dense(taking_part, pushed=True)
            progress.add(loss, skipped=skip)
            for scheduler in self.schedulers:
                scheduler.step()
            used += len(group)
            ends = after_step(used, states.popleft(), current.active == everyone)
            if profiler is not None:
                profiler.note_all_reduce(self.dense.over(current.active))
            if ends:
                following[0][1].abandon()
                break
            group, following = following, after
        return exchange.close()

    def _next_group(
        self, stream: Iterator[Batch], *, ahead: int
    ) -> list[tuple[Batch, RoutedBatch]]:
        """The batches of one step, each with its ids checked and split by server."""
        batches = list(itertools.islice(stream, self.accumulate))
        self._lap(BATCHES)
        group = [(batch, self.model._route(batch, ahead=ahead)) for batch in batches]
        self._lap(ROUTE)
        return group

    def _backward(
        self, group: list[tuple[Batch, RoutedBatch]], current: Round
    ) -> tuple[Tensor, bool]:
        """Forward, loss and backward; DDP averages the dense gradients in the last of them.

        Returns:
            The mean loss; and whether the gradients were pushed from within backward, as they are
            where nothing more happens to them first, with the dense ones if a server averages them.
        """
        module = self.dense.over(current.active)
        if self.dense_optimizer is not None:
            self.dense_optimizer.zero_grad()
        exchange = self.model._connected_exchange
        losses, pushed = [], False
        where = f"on {self.ctx.name} (step {self.ctx.step})"
        self.finite.begin()
        if self.averaging is not None:
            self.averaging.begin(reduced=len(current.active) > 1)

        def push() -> None:
            nonlocal pushed
            self._lap(BACKWARD)
            all_there = self.averaging is None or self.averaging.is_ready
            if all_there and self.finite.see_gradients():
                self._push()
                pushed = True

        may_push = (
            self.precision.scaler is None and not exchange.clips_norms and self.finite.pushes_early
        )
        for number, (batch, routed) in enumerate(group):
            last = number == len(group) - 1
            pooled = current.pooled if number == 0 else exchange.lookup(routed)
            embeddings = self.model._embed(routed, pooled, batch)
            self._lap(ROWS)
            if self.ctx.device.type != "cpu":
                batch = to_device(batch, self.ctx.device)
            with nullcontext() if last else self.dense.no_sync(current.active):
                with self.precision.autocast():
                    loss = loss_to_train(self.loss(module(embeddings, batch), batch), where)
                self.finite.see_loss(loss)
                self._lap(FORWARD)
                with self.sparse_optimizer.when_complete(push if last and may_push else None):
                    self.precision.scale(loss / len(group)).backward()  # type: ignore[no-untyped-call]
            self._lap(BACKWARD)
            losses.append(loss.detach())
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean(), pushed

    def _push(self, *, skip: bool = False) -> None:
        """Send the step's gradients to the servers; the dense ones too if one averages them."""
        dense = None if self.averaging is None else self.averaging.own()
        gradients = self.sparse_optimizer.gradients(skip=skip, dense=dense)
        self.model._connected_exchange.send(gradients)
        self.sparse_optimizer.pushed()
        self._lap(PUSH)

    def _step_dense(self, active: tuple[int, ...], *, pushed: bool) -> bool:
        """Clip and step the dense half; whether the step was skipped, for the sparse half too."""
        group = self.dense.group(active)
        skip = self.finite.settle(active, group, pushed=pushed)
        skip |= self.precision.unscale(self.dense_optimizer, self.sparse_optimizer, group)
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self.clip_value)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.precision.step(self.dense_optimizer, skip=skip)
        self._lap(DENSE)
        return skip

    def _lap(self, phase: str) -> None:
        """What has passed since the last lap was this phase of the step."""
        self.model._connected.stopwatch.lap(phase)
