"""The update rules: how a gradient changes the rows that it touches, and their state.

A rule gets copies of the touched rows and of their state as float32, changes them in place, and
the slab writes them back. Its arithmetic follows torch's optimizers of the same names.

Shapes: U touched rows, D columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hybridpar import optim
from hybridpar.errors import SpecError

State: TypeAlias = dict[str, Tensor]

Rule: TypeAlias = Callable[[Any, Tensor, State, Tensor, float, int], None]
"""Called with (settings, rows (U, D), state (U, its width) by name, gradient (U, D), lr, t)."""


def sgd(s: optim.SGD, rows: Tensor, state: State, grad: Tensor, lr: float, _: int) -> None:
    """Stochastic gradient descent, with momentum if asked for."""
    grad = _decayed(s, rows, grad)
    if s.momentum:
        buffer = state["momentum_buffer"].mul_(s.momentum).add_(grad)
        grad = grad.add(buffer, alpha=s.momentum) if s.nesterov else buffer
    rows.sub_(grad, alpha=lr)


def adagrad(s: optim.Adagrad, rows: Tensor, state: State, grad: Tensor, lr: float, t: int) -> None:
    """Adagrad, one sum a weight."""
    grad = _decayed(s, rows, grad)
    total = state["sum"].addcmul_(grad, grad)
    rows.addcdiv_(grad, total.sqrt().add_(s.eps), value=-lr / (1 + (t - 1) * s.lr_decay))


def row_wise_adagrad(
    s: optim.RowWiseAdagrad, rows: Tensor, state: State, grad: Tensor, lr: float, _: int
) -> None:
    """Adagrad, one sum a row."""
    grad = _decayed(s, rows, grad)
    total = state["sum"].add_(grad.square().mean(dim=1, keepdim=True))
    rows.addcdiv_(grad, total.sqrt().add_(s.eps), value=-lr)


def adam(s: Any, rows: Tensor, state: State, grad: Tensor, lr: float, t: int) -> None:
    """Adam, AdamW and RowWiseAdam: they differ in where decay goes and in the second moment."""
    if isinstance(s, optim.AdamW):
        rows.mul_(1 - lr * s.weight_decay)
    else:
        grad = _decayed(s, rows, grad)
    beta1, beta2 = s.betas
    squares = grad.square()
    if isinstance(s, optim.RowWiseAdam):
        squares = squares.mean(dim=1, keepdim=True)
    first = state["exp_avg"].lerp_(grad, 1 - beta1)
    second = state["exp_avg_sq"].mul_(beta2).add_(squares, alpha=1 - beta2)
    root = second.sqrt().div_(math.sqrt(1 - beta2**t)).add_(s.eps)
    rows.addcdiv_(first, root, value=-lr / (1 - beta1**t))


def rmsprop(s: optim.RMSprop, rows: Tensor, state: State, grad: Tensor, lr: float, _: int) -> None:
    """RMSprop."""
    grad = _decayed(s, rows, grad)
    average = state["square_avg"].mul_(s.alpha).addcmul_(grad, grad, value=1 - s.alpha)
    rows.addcdiv_(grad, average.sqrt().add_(s.eps), value=-lr)


def ftrl(s: optim.FTRL, rows: Tensor, state: State, grad: Tensor, lr: float, _: int) -> None:
    """FTRL-Proximal."""
    grad = _decayed(s, rows, grad)
    z, n = state["z"], state["n"]
    before = n.sqrt()
    root = n.addcmul_(grad, grad).sqrt()
    z.add_(grad).sub_((root - before).div_(lr).mul_(rows))
    slope = root.add_(s.beta).div_(lr).add_(s.l2)
    shrunk = torch.sign(z) * (z.abs() - s.l1).clamp_(min=0.0)
    rows.copy_(shrunk.div_(slope).neg_())


def _decayed(s: optim.SparseOptimizerSettings, rows: Tensor, grad: Tensor) -> Tensor:
    return grad.add(rows, alpha=s.weight_decay) if s.weight_decay else grad


_RULES: dict[type, Rule] = {
    optim.SGD: sgd,
    optim.Adagrad: adagrad,
    optim.RowWiseAdagrad: row_wise_adagrad,
    optim.Adam: adam,
    optim.AdamW: adam,
    optim.RowWiseAdam: adam,
    optim.RMSprop: rmsprop,
    optim.FTRL: ftrl,
}


def rule_for(settings: optim.SparseOptimizerSettings) -> Rule:
    """The rule that a setting asks for.

    Raises:
        SpecError: if no rule is known for the setting.
    """
    rule = _RULES.get(type(settings))
    if rule is None:
        raise SpecError(f"No update rule for {settings!r}. Use a class of hybridpar.optim.")
    return rule


def is_linear(settings: optim.SparseOptimizerSettings) -> bool:
    """Whether an update is a multiple of the gradient, so that repeats need not be summed."""
    return (
        isinstance(settings, optim.SGD)
        and not settings.momentum
        and not settings.weight_decay
        and settings.clip_value is None
        and settings.clip_norm is None
    )
