"""The parts that a user gives a loop, checked: model, dense optimizer, schedulers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hybridpar.counterparts import dense_name
from hybridpar.errors import SpecError
from hybridpar.optim import SparseOptimizerSettings
from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.model import HybridModel


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
