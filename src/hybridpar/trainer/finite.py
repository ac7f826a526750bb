"""`FiniteCheck`: what becomes of a step whose loss or gradients hold NaN or infinity."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridpar.errors import InputError, PeerLostError
from hybridpar.rollcall import Ranks
from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.settings import NonFinite
from hybridpar.trainer.sparse_optimizer import SparseOptimizer

_MEND = (
    "Look at what is in that batch, lower the learning rate, or clip the gradients. "
    'TrainerLoop(non_finite="skip") leaves such steps out, "ignore" takes them.'
)


class FiniteCheck:
    """Looks at each step's loss and gradients, and refuses it or has all trainers skip it.

    Args:
        policy: ``"raise"``, ``"skip"`` or ``"ignore"``.
        ctx: this trainer's context.
        model: its parameters are the dense half.
        sparse: the tables' optimizer, which has their gradients.
        reduced_in_place: whether, while backward is under way, a parameter's gradient may already
            be other trainers' too: so it is under DDP's ``gradient_as_bucket_view``.
    """

    def __init__(
        self,
        policy: NonFinite,
        ctx: TrainerContext,
        model: nn.Module,
        sparse: SparseOptimizer,
        *,
        reduced_in_place: bool,
    ) -> None:
        self._policy = policy
        self._ctx = ctx
        self._parameters = [(f"parameter '{name}'", p) for name, p in model.named_parameters()]
        self._sparse = sparse
        self._reduced_in_place = reduced_in_place
        self._step: int | None = None
        self._found = ""  # of this trainer's own: what is not finite in the step under way

    @property
    def pushes_early(self) -> bool:
        """Whether gradients may leave from within backward, before all trainers have agreed."""
        return self._policy != "skip"

    def begin(self) -> None:
        """A new step: nothing is known of it."""
        self._found = ""
        self._step = self._ctx.step

    def see_loss(self, loss: Tensor) -> None:
        """Look at a loss, (), before its backward.

        Raises:
            InputError: if it is not finite and the policy is ``"raise"``.
        """
        if self._policy == "ignore" or math.isfinite(loss.item()):
            return
        self._found = f"The loss on {self._where} is {loss.item()}."
        if self._policy == "raise":
            raise InputError(f"{self._found} {_MEND}")

    def see_gradients(self) -> bool:
        """Look at this trainer's gradients, all of them there; whether they may leave."""
        if self._policy != "ignore" and not self._found:
            gradients = self._sparse.named_gradients()
            if not self._reduced_in_place:
                gradients += self._dense_gradients()
            self._found = self._described(first_non_finite(gradients))
        return not self._found

    def require_gradients(self) -> None:
        """Look at this trainer's gradients, none of them averaged yet.

        Raises:
            InputError: if something is not finite, unless the policy is ``"ignore"``.
        """
        if not self.see_gradients():
            raise InputError(f"{self._found} {_MEND}")

    def settle(self, active: Ranks, group: dist.ProcessGroup | None, *, pushed: bool) -> bool:
        """Look at what backward left, the dense half's gradients averaged over the trainers.

        Args:
            active: the trainers of the step.
            group: their process group; None if there is one.
            pushed: whether the tables' gradients have been looked at, and have left.

        Returns:
            Whether all of them skip the step.

        Raises:
            InputError: if the policy is ``"raise"`` and something is not finite.
            PeerLostError: if it is another trainer's, which raises InputError.
        """
        if self._policy == "ignore":
            return False
        if not pushed and not self._found:
            self._found = self._described(first_non_finite(self._sparse.named_gradients()))
        name = "" if self._found and group is None else first_non_finite(self._dense_gradients())
        if self._policy == "skip":
            return self._any_asks(group, bool(self._found or name))
        if name and group is not None:
            self._leave_it_to_its_trainer(active, group)
        if self._found or name:
            by_all = "" if group is None else ", averaged over the trainers,"
            raise InputError(f"{self._found or self._described(name, by_all)} {_MEND}")
        return False

    def _any_asks(self, group: dist.ProcessGroup | None, skip: bool) -> bool:
        """Whether any trainer of the step wants to skip it."""
        if group is None:
            return skip
        wish = torch.tensor([float(skip)])
        dist.all_reduce(wish, op=dist.ReduceOp.MAX, group=group)
        return bool(wish)

    def _leave_it_to_its_trainer(self, active: Ranks, group: dist.ProcessGroup) -> None:
        """Have the trainer raise that a value comes from, where all see it in their average.

        The average is the same on all of them, so all come here.
        """
        found = torch.tensor([float(bool(self._found) and r == self._ctx.rank) for r in active])
        dist.all_reduce(found, group=group)
        names = [f"trainer{rank}" for rank, own in zip(active, found.tolist(), strict=True) if own]
        if names and not self._found:
            raise PeerLostError(
                f"{self._ctx.name} ends in step {self._ctx.step}, because {', '.join(names)} got "
                "a gradient that is not finite."
            )

    def _dense_gradients(self) -> list[tuple[str, Tensor]]:
        return [(name, p.grad) for name, p in self._parameters if p.grad is not None]

    def _described(self, name: str, by_all: str = "") -> str:
        return name and f"The gradient of {name} on {self._where}{by_all} is not finite."

    @property
    def _where(self) -> str:
        return f"{self._ctx.name} (step {self._step})"


def first_non_finite(tensors: Sequence[tuple[str, Tensor]]) -> str:
    """The name of the first tensor that holds NaN or infinity, and which; empty if none does.

    A sum is far cheaper than a look at every value, and shows any of them. It may overflow though
    no value did, so it only ever acquits. So may that of the whole tensor that several are views
    of: the gradients of embeddings that were concatenated, say.
    """
    if not tensors:
        return ""
    wholes = {id(whole): whole for whole in (_whole(tensor) for _, tensor in tensors)}
    sums = [_values(whole).sum() for whole in wholes.values()]
    total = sums[0] if len(sums) == 1 else torch.stack([each.float() for each in sums]).sum()
    if math.isfinite(total.item()):
        return ""
    return next((name for name, tensor in tensors if not _values(tensor).isfinite().all()), "")


def _whole(tensor: Tensor) -> Tensor:
    """The contiguous tensor that a strided one is a view of; else itself."""
    base = tensor._base
    return tensor if base is None or tensor.is_contiguous() else base


def _values(tensor: Tensor) -> Tensor:
    """A tensor's values as real numbers of a dense tensor."""
    if tensor.is_sparse:
        tensor = tensor._values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
