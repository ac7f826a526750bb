"""`DenseHalf`: the replicated half of a model, on whichever trainers still have data.

DistributedDataParallel reduces over a fixed group; a trainer whose data has run out would leave the
others waiting for ever. So each set of trainers that goes on gets a group and a wrapper of its own
around the same module, and DDP averages over just them. Whoever stopped early then takes the dense
state of one that did not.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hybridpar.errors import SpecError
from hybridpar.trainer.context import TrainerContext

CommHook: TypeAlias = Callable[[dist.ProcessGroup], tuple[Any, Callable[..., Any]]]
"""From the process group that reduces to what DDP's ``register_comm_hook`` takes: (state, hook)."""


class DenseHalf:
    """Runs a model's forward under DDP over the trainers that take part in a step.

    Building it is collective, and leaves every trainer with trainer 0's parameters.

    Args:
        model: the module whose parameters are replicated.
        ctx: this trainer's context.
        ddp: keyword arguments of DistributedDataParallel.
        comm_hook: makes the hook to register with each wrapper.
    """

    def __init__(
        self,
        model: nn.Module,
        ctx: TrainerContext,
        ddp: Mapping[str, Any],
        comm_hook: CommHook | None,
    ) -> None:
        if comm_hook is not None and not callable(comm_hook):
            raise SpecError(
                f"comm_hook is {comm_hook!r}. Give a function from the process group that reduces "
                "to (state, hook): lambda group: (state, hook)."
            )
        for name in ("module", "device_ids", "output_device", "process_group"):
            if name in ddp:
                raise SpecError(f"ddp has '{name}', which hybridpar sets itself. Leave it out.")
        self._model = model
        self._ctx = ctx
        self._ddp = dict(ddp)
        self._comm_hook = comm_hook
        self._sync_norms = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._wrapped: dict[tuple[int, ...], nn.Module] = {}
        self.over(tuple(range(ctx.num_trainers)))

    def over(self, ranks: tuple[int, ...]) -> nn.Module:
        """The module to call in a step that the trainers of ``ranks`` take, this one among them."""
        if ranks not in self._wrapped:
            self._wrapped[ranks] = self._wrap(ranks)
        if self._sync_norms:
            group = self.group(ranks) or self._own_group()
            for norm in self._sync_norms:
                norm.process_group = group
        return self._wrapped[ranks]

    def no_sync(self, ranks: tuple[int, ...]) -> AbstractContextManager[None]:
        """Within it, backward adds up gradients here alone: for all but the last of several."""
        module = self.over(ranks)
        if isinstance(module, DistributedDataParallel):
            return module.no_sync()
        return nullcontext()

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The process group of some trainers; None if that is one trainer."""
        if len(ranks) == 1:
            return None
        if len(ranks) == self._ctx.num_trainers:
            return dist.group.WORLD
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self._groups[ranks]

    def _own_group(self) -> dist.ProcessGroup:
        """A group of this trainer alone: to SyncBatchNorm, None would mean all trainers."""
        own = (self._ctx.rank,)
        if own not in self._groups:
            self._groups[own] = dist.new_group(list(own), use_local_synchronization=True)
        return self._groups[own]

    def _wrap(self, ranks: tuple[int, ...]) -> nn.Module:
        group = self.group(ranks)
        if group is None or not any(p.requires_grad for p in self._model.parameters()):
            return self._model
        cuda = self._ctx.device.type == "cuda"
        wrapped = DistributedDataParallel(
            self._model,
            device_ids=[self._ctx.device] if cuda else None,
            process_group=group,
            **self._ddp,
        )
        if self._comm_hook is not None:
            wrapped.register_comm_hook(*self._comm_hook(group))
        return wrapped


def copy_from(rank: int, ctx: TrainerContext, holders: Mapping[str, Any]) -> None:
    """Give every trainer the state of one, and its step. Collective.

    Args:
        rank: the trainer whose state is taken.
        ctx: this trainer's context.
        holders: what has a ``state_dict``: model, optimizers, schedulers and so on.
    """
    state = {name: holder.state_dict() for name, holder in holders.items()}
    state["step"] = ctx.step
    state = _broadcast(state, rank, mine=ctx.rank == rank)
    if ctx.rank != rank:
        for name, holder in holders.items():
            holder.load_state_dict(state[name])
        ctx.step = state["step"]


@contextmanager
def buffers_of(rank: int, ctx: TrainerContext, model: nn.Module) -> Iterator[None]:
    """Within it, every trainer has the buffers of one. Collective.

    Between two steps they differ: BatchNorm's running averages have seen this trainer's batch.
    """
    buffers = list(model.buffers()) if ctx.num_trainers > 1 else []
    own = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        dist.broadcast(buffer, src=rank)
    try:
        yield
    finally:
        for buffer, value in zip(buffers, own, strict=True):
            buffer.copy_(value)


def _broadcast(value: Any, source: int, *, mine: bool) -> Any:
    """What ``source`` has, on every trainer; torch's broadcast_object_list would need NumPy."""
    buffer = io.BytesIO()
    if mine:
        torch.save(value, buffer)
    size = torch.tensor([buffer.tell()])
    dist.broadcast(size, src=source)
    data = bytearray(buffer.getvalue()) if mine else bytearray(int(size))
    dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), src=source)
    # From a process of this very job; schedulers' states may hold more than plain values.
    return torch.load(io.BytesIO(data), weights_only=False, map_location="cpu")
