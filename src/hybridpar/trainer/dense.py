"""`DenseHalf`: the replicated half of a model, on whichever trainers still have data.

DistributedDataParallel reduces over a fixed group; a trainer whose data has run out would leave the
others waiting for ever. So each set of trainers that goes on gets a group and a wrapper of its own
around the same module, and DDP averages over just them. Whoever stopped early then takes the dense
state of one that did not.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
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
        optimizer: steps the parameters; its state is brought along after an uneven epoch.
        ddp: keyword arguments of DistributedDataParallel.
        comm_hook: makes the hook to register with each wrapper.
        scaler: the loss scaler, whose state is brought along too.
    """

    def __init__(
        self,
        model: nn.Module,
        ctx: TrainerContext,
        optimizer: torch.optim.Optimizer | None,
        ddp: Mapping[str, Any],
        comm_hook: CommHook | None,
        scaler: GradScaler | None,
    ) -> None:
        for name in ("module", "device_ids", "output_device", "process_group"):
            if name in ddp:
                raise SpecError(f"ddp has '{name}', which hybridpar sets itself. Leave it out.")
        self._model = model
        self._ctx = ctx
        self._optimizer = optimizer
        self._ddp = dict(ddp)
        self._comm_hook = comm_hook
        self._scaler = scaler
        self._sync_norms = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._wrapped: dict[tuple[int, ...], nn.Module] = {}
        self.over(tuple(range(ctx.num_trainers)))

    def over(self, ranks: tuple[int, ...]) -> nn.Module:
        """The module to call in a step that the trainers of ``ranks`` take, this one among them."""
        if ranks not in self._wrapped:
            self._wrapped[ranks] = self._wrap(ranks)
        for norm in self._sync_norms:
            norm.process_group = self.group(ranks)
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

    def copy_from(self, rank: int) -> None:
        """Give every trainer the dense half of one, and all that goes with it. Collective.

        That is parameters and buffers, and the state of the optimizer and of the loss scaler.
        """
        holders = {"model": self._model, "optimizer": self._optimizer, "scaler": self._scaler}
        parts = {name: holder for name, holder in holders.items() if holder is not None}
        state = {name: holder.state_dict() for name, holder in parts.items()}
        state["step"] = {"step": self._ctx.step}
        state = _broadcast(state, rank, mine=self._ctx.rank == rank)
        if self._ctx.rank != rank:
            for name, holder in parts.items():
                holder.load_state_dict(state[name])
            self._ctx.step = state["step"]["step"]


def _broadcast(value: Any, source: int, *, mine: bool) -> Any:
    """What ``source`` has, on every trainer; torch's broadcast_object_list would need NumPy."""
    buffer = io.BytesIO()
    if mine:
        torch.save(value, buffer)
    size = torch.tensor([buffer.tell()])
    dist.broadcast(size, src=source)
    data = bytearray(buffer.getvalue()) if mine else bytearray(int(size))
    dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), src=source)
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
