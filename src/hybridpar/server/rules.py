"""The update rules: what a gradient adds to the rows that it touches, and makes of their state.

A rule gets copies of the touched rows' state as float32, changes them in place, and returns what is
to be added to the rows; the slab writes both back. The rows themselves it gets only if it asks:
reading them costs as much as all the rest. Its arithmetic follows torch's optimizers of the same
names.

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

Rule: TypeAlias = Callable[[Any, "Tensor | None", State, Tensor, float, int], Tensor]
"""Called with (settings, rows (U, D) or None, state (U, its width) by name, gradient (U, D), lr,
t); returns the change of the rows (U, D), and may overwrite the gradient."""


def sgd(s: optim.SGD, rows: Tensor | None, state: State, grad: Tensor, lr: float, _: int) -> Tensor:
    """Stochastic gradient descent, with momentum if asked for."""
    grad = _decayed(s, rows, grad)
    if s.momentum:
        buffer = state["momentum_buffer"].mul_(s.momentum).add_(grad)
        grad = grad.add_(buffer, alpha=s.momentum) if s.nesterov else grad.copy_(buffer)
    return grad.mul_(-lr)


def adagrad(
    s: optim.Adagrad, rows: Tensor | None, state: State, grad: Tensor, lr: float, t: int
) -> Tensor:
    """Adagrad, one sum a weight."""
    grad = _decayed(s, rows, grad)
    total = state["sum"].addcmul_(grad, grad)
    return grad.div_(total.sqrt().add_(s.eps)).mul_(-lr / (1 + (t - 1) * s.lr_decay))


def row_wise_adagrad(
    s: optim.RowWiseAdagrad, rows: Tensor | None, state: State, grad: Tensor, lr: float, _: int
) -> Tensor:
    """Adagrad, one sum a row."""
    grad = _decayed(s, rows, grad)
    total = state["sum"].add_(_mean_square(grad))
    return grad.mul_(total.sqrt().add_(s.eps).reciprocal_().mul_(-lr))


def adam(s: Any, rows: Tensor | None, state: State, grad: Tensor, lr: float, t: int) -> Tensor:
    """Adam, AdamW and RowWiseAdam: they differ in where decay goes and in the second moment."""
    decoupled = isinstance(s, optim.AdamW)
    if not decoupled:
        grad = _decayed(s, rows, grad)
    beta1, beta2 = s.betas
    squares = _mean_square(grad) if isinstance(s, optim.RowWiseAdam) else grad.square()
    first = state["exp_avg"].lerp_(grad, 1 - beta1)
    second = state["exp_avg_sq"].mul_(beta2).add_(squares, alpha=1 - beta2)
    root = second.sqrt().div_(math.sqrt(1 - beta2**t)).add_(s.eps)
    change = torch.div(first, root, out=grad).mul_(-lr / (1 - beta1**t))
    if decoupled and rows is not None:
        change.add_(rows, alpha=-lr * s.weight_decay)
    return change


def rmsprop(
    s: optim.RMSprop, rows: Tensor | None, state: State, grad: Tensor, lr: float, _: int
) -> Tensor:
    """RMSprop."""
    grad = _decayed(s, rows, grad)
    average = state["square_avg"].mul_(s.alpha).addcmul_(grad, grad, value=1 - s.alpha)
    return grad.div_(average.sqrt().add_(s.eps)).mul_(-lr)


def ftrl(
    s: optim.FTRL, rows: Tensor | None, state: State, grad: Tensor, lr: float, _: int
) -> Tensor:
    """FTRL-Proximal."""
    assert rows is not None
    grad = _decayed(s, rows, grad)
    z, n = state["z"], state["n"]
    if lr == 0:  # a schedule's end: the formula divides by it
        n.addcmul_(grad, grad)
        return torch.zeros_like(grad)
    before = n.sqrt()
    root = n.addcmul_(grad, grad).sqrt()
    z.add_(grad).sub_((root - before).div_(lr).mul_(rows))
    slope = root.add_(s.beta).div_(lr).add_(s.l2)
    shrunk = torch.sign(z) * (z.abs() - s.l1).clamp_(min=0.0)
    return shrunk.div_(slope).neg_().sub_(rows)


def _decayed(s: optim.SparseOptimizerSettings, rows: Tensor | None, grad: Tensor) -> Tensor:
    return grad if rows is None or not s.weight_decay else grad.add_(rows, alpha=s.weight_decay)


def _mean_square(grad: Tensor) -> Tensor:
    """(U, 1): faster than ``grad.square().mean(1)`` by half."""
    norms: Tensor = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
    return norms.square_().div_(grad.shape[1])


def needs_rows(settings: optim.SparseOptimizerSettings) -> bool:
    """Whether a rule looks at the rows that it changes."""
    return settings.weight_decay > 0 or isinstance(settings, optim.FTRL)


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
