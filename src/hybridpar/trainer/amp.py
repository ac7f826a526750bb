"""`MixedPrecision`: autocast and loss scaling, for both halves of a model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.sparse_optimizer import SparseOptimizer


class MixedPrecision:
    """What mixed precision adds to a step; nothing if neither argument is given.

    Embeddings come, and their gradients go, as float32; autocast casts between.

    Args:
        ctx: this trainer's context.
        autocast: the dtype that forward and loss run in, such as :data:`torch.bfloat16`.
        scaler: scales the loss, so that small float16 gradients do not vanish.
    """

    def __init__(
        self, ctx: TrainerContext, autocast: torch.dtype | None, scaler: GradScaler | None
    ) -> None:
        self._ctx = ctx
        self._dtype = autocast
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        # Tells the scaler what it cannot see: an overflow in a table's gradient, or elsewhere.
        self._flag = torch.zeros(1, device=ctx.device, requires_grad=True)
        self._flag_optimizer = torch.optim.SGD([self._flag], lr=0.0)

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler in use."""
        return self._scaler

    def autocast(self) -> torch.autocast:
        """The context for forward and loss."""
        return torch.autocast(
            self._ctx.device.type, dtype=self._dtype, enabled=self._dtype is not None
        )

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(
        self,
        dense: torch.optim.Optimizer | None,
        sparse: SparseOptimizer,
        group: dist.ProcessGroup | None,
    ) -> bool:
        """Bring the gradients of both halves back to their true size.

        Args:
            dense: the dense half's optimizer, if it has parameters.
            sparse: the sparse half's.
            group: the trainers of the step, who must agree; None if there is one.

        Returns:
            Whether the step is to be skipped, by all trainers alike: a gradient of one of them has
            overflowed.
        """
        if self._scaler is None:
            return False
        factor = 1.0 / self._scaler.get_scale()
        overflow = torch.zeros(())
        for gradient in sparse.gradient_tensors():
            gradient.mul_(factor)
            overflow = torch.maximum(overflow, (~gradient.isfinite()).any().float().cpu())
        if dense is not None:
            self._scaler.unscale_(dense)
            for members in dense.param_groups:
                for parameter in members["params"]:
                    if parameter.grad is not None and not parameter.grad.isfinite().all():
                        overflow.fill_(1.0)
        if group is not None:
            dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=group)
        self._flag.grad = torch.full_like(self._flag, float("inf") if overflow else 0.0)
        self._scaler.unscale_(self._flag_optimizer)
        return bool(overflow)

    def step(self, dense: torch.optim.Optimizer | None, *, skip: bool) -> None:
        """Step the dense optimizer unless the step is skipped, and adapt the scale."""
        if dense is not None and skip:
            dense._opt_called = True  # type: ignore[attr-defined] # else schedulers warn
        elif dense is not None and self._scaler is None:
            dense.step()
        elif dense is not None and self._scaler is not None:
            self._scaler.step(dense)
        if self._scaler is not None:
            self._scaler.update()
