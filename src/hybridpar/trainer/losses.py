"""What a user's loss function returns, as the scalar to train on or to report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor

from hybridpar.errors import InputError

Losses: TypeAlias = "Tensor | Mapping[str, Tensor]"


def total_loss(losses: Losses, where: str) -> Tensor:
    """The loss, or the sum of several.

    Args:
        losses: a scalar tensor, or several by name.
        where: whose it is, for messages, such as ``"on trainer0 (step 3)"``.

    Raises:
        InputError: if one is no scalar, or there is none.
    """
    named = losses if isinstance(losses, Mapping) else {"": losses}
    if not named:
        raise InputError(f"The loss {where} is an empty dict. Return one loss at least.")
    for name, part in named.items():
        if not isinstance(part, Tensor) or part.numel() != 1:
            got = f"of shape {tuple(part.shape)}" if isinstance(part, Tensor) else _kind(part)
            raise InputError(
                f"The loss {where}{name and f', {name!r},'} is {got}. Return a scalar tensor, "
                "such as loss.mean(), or several by name."
            )
    first, *others = named.values()
    return sum(others, start=first)


def loss_to_train(losses: Losses, where: str) -> Tensor:
    """As `total_loss`, for a loss that backward is called on.

    Raises:
        InputError: also if it has no gradient.
    """
    total = total_loss(losses, where)
    if not total.requires_grad:
        raise InputError(
            f"The loss {where} depends on no embedding and no parameter that learns, so there "
            "is no gradient. Look for a detach(), item() or no_grad() in forward or loss, or "
            "for a model that is frozen as a whole."
        )
    return total


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
