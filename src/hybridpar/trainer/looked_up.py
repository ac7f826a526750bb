"""`LookedUp`: rows on their way through autograd, and the gradient that comes back for them.

Shapes: S bags of one slab, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridpar.shared_memory import Outbox
from hybridpar.trainer.pieces import Piece

if TYPE_CHECKING:
    from hybridpar.trainer.routing import RoutedBatch


class LookedUp:
    """What one forward uses of one slab, or of one hosted module.

    Attributes:
        batch: what it was looked up for.
        server: rank of the server.
        slab: index of the slab there; -1 for a hosted module's output.
        pieces: of a slab, what the rows are, in order.
        module: of a hosted module, its name and the number of the call.
    """

    def __init__(
        self,
        batch: RoutedBatch,
        server: int,
        slab: int,
        *,
        pieces: Sequence[Piece] = (),
        module: tuple[str, int] = ("", 0),
    ) -> None:
        self.batch = batch
        self.server = server
        self.slab = slab
        self.pieces = pieces
        self.module = module
        self.on_gradient: Callable[[LookedUp], None] = lambda _: None
        self._grads: list[Tensor | None] = []
        self._owned = False

    def embed(
        self, values: Tensor, sizes: list[int], trained: Sequence[bool]
    ) -> tuple[Tensor, ...]:
        """The rows, a tensor a piece, such that backward through them ends here.

        Args:
            values: (S, D) float32.
            sizes: how many rows each piece has; all are one piece's if there is one.
            trained: for each piece, whether a gradient is wanted.
        """
        embed: Callable[..., tuple[Tensor, ...]] = _Embed.apply
        return embed(_anchor, self, values, sizes, trained)

    @property
    def has_gradient(self) -> bool:
        """Whether a backward pass has come to it since the last step."""
        return bool(self._grads)

    @property
    def is_whole(self) -> bool:
        """Whether every piece has a gradient: not if the loss left some out."""
        return all(grad is not None for grad in self._grads)

    def gradients(self) -> list[Tensor | None]:
        """For each piece its gradient, (its rows, D)."""
        return self._grads

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """The gradients that came, each with whose it is, such as ``"table 'item'"``."""
        if self.slab < 0:
            names = [f"module '{self.module[0]}'"]
        else:
            names = [f"table '{self.batch.table_of(piece.feature)}'" for piece in self.pieces]
        named = zip(names, self._grads, strict=True)
        return [(name, grad) for name, grad in named if grad is not None]

    def joined(self, outbox: Outbox | None, dtype: torch.dtype) -> Tensor:
        """The whole gradient: (S, D) of a dtype on the CPU, in the outbox if there is one."""
        grads = [grad for grad in self._grads if grad is not None]
        out: Tensor | None = None
        if outbox is not None:
            rows = sum(grad.shape[0] for grad in grads)
            out = outbox.take((rows, grads[0].shape[1]), dtype)
        if out is None:
            return (grads[0] if len(grads) == 1 else torch.cat(grads)).to("cpu", dtype)
        if len(grads) == 1 or grads[0].dtype != dtype or grads[0].device != out.device:
            return out.copy_(grads[0] if len(grads) == 1 else torch.cat(grads))
        return torch.cat(grads, out=out)

    def clear(self) -> None:
        """Forget the gradient."""
        self._grads = []
        self._owned = False

    def receive(self, grads: Sequence[Tensor | None]) -> None:
        """Add what a backward pass brought: for each piece its gradient, or None for none."""
        if all(grad is None for grad in grads):
            return
        if self._grads:
            self._grads = [
                old if new is None else new.detach().clone() if old is None else old.add_(new)
                for old, new in zip(self._grads, grads, strict=True)
            ]
        else:
            self._grads = list(grads)
        self.on_gradient(self)
        if self._grads and not self._owned:  # not sent off at once: what autograd lent goes back
            self._grads = [None if grad is None else grad.detach().clone() for grad in self._grads]
            self._owned = True


class _Embed(torch.autograd.Function):
    """One node for all pieces of a slab, which tells those that the loss used from the others."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,  # noqa: ARG004 - requires a gradient, so that the outputs do
        looked_up: LookedUp,
        values: Tensor,
        sizes: list[int],
        trained: Sequence[bool],
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.looked_up = looked_up
        # Of the same memory, but no views to autograd: free to be changed in place.
        outputs: tuple[Tensor, ...]
        if len(sizes) == 1:
            outputs = (torch.ops.aten._unsafe_view(values, values.shape),)
        else:
            outputs = tuple(torch.unsafe_split_with_sizes(values, sizes))
        ctx.mark_non_differentiable(
            *(output for output, wanted in zip(outputs, trained, strict=True) if not wanted)
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.looked_up.receive(grads)
        return None, None, None, None, None


_anchor = torch.empty(0, requires_grad=True)
