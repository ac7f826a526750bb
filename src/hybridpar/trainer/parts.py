"""The parts that a user gives a loop, checked and put together into its `Steps`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from hybridpar.counterparts import dense_name
from hybridpar.errors import SpecError
from hybridpar.optim import SparseOptimizerSettings
from hybridpar.trainer.amp import MixedPrecision
from hybridpar.trainer.averaging import AverageBy, server_average
from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.dense import CommHook, DenseHalf
from hybridpar.trainer.finite import FiniteCheck
from hybridpar.trainer.losses import Losses
from hybridpar.trainer.model import HybridModel
from hybridpar.trainer.settings import NonFinite
from hybridpar.trainer.sparse_optimizer import SparseOptimizer
from hybridpar.trainer.steps import Steps

Batch = TypeVar("Batch")
MakeSchedulers: TypeAlias = Callable[
    ["torch.optim.Optimizer | None", SparseOptimizer], Sequence[LRScheduler]
]


def no_schedulers(*_: object) -> Sequence[LRScheduler]:
    """What a loop has if it is given none."""
    return ()


def check_parts(model: object, ctx: object) -> None:
    """Refuse a model or a context that is none."""
    if not isinstance(model, HybridModel):
        raise SpecError(
            f"TrainerLoop got a {type(model).__name__} as its model. Subclass "
            "hybridpar.HybridModel, which says what tables and ids there are."
        )
    if not isinstance(ctx, TrainerContext):
        raise SpecError(
            f"TrainerLoop got a {type(ctx).__name__} as its ctx. Pass on the ctx that the train "
            "function is called with."
        )


def checked_schedulers(schedulers: object) -> list[LRScheduler]:
    """What the user's function returned, if it is schedulers."""
    made: list[Any] = list(schedulers) if isinstance(schedulers, Iterable) else [schedulers]
    for each in made:
        if not (hasattr(each, "step") and hasattr(each, "state_dict")):
            raise SpecError(
                f"schedulers gave a {type(each).__name__}. Return a list of torch's learning-rate "
                "schedulers, such as [torch.optim.lr_scheduler.StepLR(dense, 100)]."
            )
    return made


def built_dense_optimizer(
    model: nn.Module, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> torch.optim.Optimizer | None:
    """The optimizer of a model's trainable parameters; None if there are none."""
    given: object = make
    kind = given if isinstance(given, type) else type(given)
    if issubclass(kind, SparseOptimizerSettings):
        raise SpecError(
            f"dense_optimizer got {given!r}, a setting for tables. Give a function of the "
            f"parameters: lambda params: torch.optim.{dense_name(given)}(params, lr=...)."
        )
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


def built_steps(
    model: HybridModel[Batch],
    ctx: TrainerContext,
    *,
    loss: Callable[[Any, Batch], Losses],
    dense_optimizer: torch.optim.Optimizer | None,
    sparse_optimizer: SparseOptimizer,
    schedulers: MakeSchedulers,
    accumulate: int,
    autocast: torch.dtype | None,
    grad_scaler: GradScaler | None,
    clip_grad_norm: float | None,
    clip_grad_value: float | None,
    ddp: Mapping[str, Any],
    comm_hook: CommHook | None,
    non_finite: NonFinite,
    average_by: AverageBy,
) -> Steps[Batch]:
    """What takes a loop's steps, from the loop's settings; see `TrainerLoop`. Collective."""
    precision = MixedPrecision(ctx, autocast, grad_scaler)
    averaging = server_average(
        average_by, model, model._connected, scaled=precision.scaler is not None,
        non_finite=non_finite, ddp=ddp, comm_hook=comm_hook,
    )  # fmt: skip
    if averaging is not None:
        comm_hook = averaging.comm_hook
    return Steps(
        model=model,
        ctx=ctx,
        loss=loss,
        dense_optimizer=dense_optimizer,
        sparse_optimizer=sparse_optimizer,
        dense=DenseHalf(model, ctx, ddp, comm_hook),
        averaging=averaging,
        precision=precision,
        finite=FiniteCheck(
            non_finite if precision.scaler is None else "ignore",
            ctx,
            model,
            sparse_optimizer,
            reduced_in_place=averaging is None and bool(ddp.get("gradient_as_bucket_view")),
        ),
        schedulers=checked_schedulers(schedulers(dense_optimizer, sparse_optimizer)),
        accumulate=accumulate,
        clip_norm=clip_grad_norm,
        clip_value=clip_grad_value,
    )
