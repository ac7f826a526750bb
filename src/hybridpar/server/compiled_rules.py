"""Which update rules are compiled: the numbers that one step of them takes."""

from __future__ import annotations

import math

from hybridpar import optim
from hybridpar.kernels.compiled import Rule, Step


def compiled_step(settings: optim.SparseOptimizerSettings, lr: float, t: int) -> Step | None:
    """A step of a rule, as in :mod:`hybridpar.server.rules`; None if it is not compiled.

    Args:
        settings: the rule's.
        lr: the learning rate in force.
        t: how many steps there have been, this one included.
    """
    if settings.clip_value is not None:
        return None
    decay = settings.weight_decay
    match settings:
        case optim.Adagrad():
            lr = lr / (1 + (t - 1) * settings.lr_decay)
            return Step(Rule.ADAGRAD, lr, settings.eps, decay)
        case optim.RowWiseAdagrad():
            return Step(Rule.ROW_WISE_ADAGRAD, lr, settings.eps, decay)
        case optim.Adam() | optim.AdamW() | optim.RowWiseAdam():
            row_wise = isinstance(settings, optim.RowWiseAdam)
            decoupled = isinstance(settings, optim.AdamW)
            return Step(
                Rule.ROW_WISE_ADAM if row_wise else Rule.ADAM,
                lr / (1 - settings.betas[0] ** t),
                settings.eps,
                decay=0.0 if decoupled else decay,
                shrink=lr * decay if decoupled else 0.0,
                betas=settings.betas,
                root_correction=math.sqrt(1 - settings.betas[1] ** t),
            )
    return None
