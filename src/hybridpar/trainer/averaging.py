"""Who averages the dense half's gradients: DDP by an all-reduce, or a server with the tables' push.

In sync mode a server gathers every trainer's gradients in each step anyway. Those of a small dense
half go with them and their mean comes back with the rows: one round trip a step, and no all-reduce,
which takes longer than all the rest where little is to be computed. DDP still does what else it
does; a communication hook leaves it the trainer's own gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from hybridpar.errors import InputError, SpecError
from hybridpar.trainer.dense import CommHook
from hybridpar.trainer.settings import NonFinite
from hybridpar.trainer.tables import RemoteTables

AverageBy: TypeAlias = Literal["auto", "ddp", "servers"]

SMALL_BYTES = 1 << 16  # of gradients: up to here an all-reduce is all latency
_OWN_REDUCTION = ("mixed_precision", "delay_all_reduce_named_params")  # of DDP's arguments


class ServerAverage:
    """The dense half's gradients as one tensor, for a server to average.

    Args:
        model: its trainable parameters are the dense half.
        all_used: whether every parameter gets a gradient in every step.
    """

    def __init__(self, model: nn.Module, *, all_used: bool) -> None:
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._all_used = all_used
        self._ready = False
        self._reduced = False

    def begin(self, *, reduced: bool) -> None:
        """A new backward pass: no gradient is there.

        Args:
            reduced: whether DDP wraps the model in it, and wants every parameter to be used.
        """
        self._ready = False
        self._reduced = reduced

    @property
    def is_ready(self) -> bool:
        """Whether all gradients are known to be there, in the midst of a backward pass."""
        return self._ready and self._all_used and not self._missing()

    def comm_hook(self, _: object) -> tuple[None, Any]:
        """DDP's communication hook, which leaves every trainer its own gradients."""
        return None, lambda _, bucket: self._keep(bucket)  # DDP minds a hook's annotations

    def _keep(self, bucket: Any) -> torch.futures.Future[Tensor]:
        self._ready = bucket.is_last()  # they come in order
        kept: torch.futures.Future[Tensor] = torch.futures.Future()
        kept.set_result(bucket.buffer())
        return kept

    def own(self) -> Tensor | None:
        """This trainer's gradients, one after another, of as many parameters as have one.

        Raises:
            InputError: if some have none that should, so that trainers would mix theirs up.
        """
        if self._all_used and self._reduced and (missing := self._missing()):
            raise InputError(
                f"Parameter {missing} got no gradient: the loss does not depend on it. DDP must "
                'know of it: give the loop ddp={"find_unused_parameters": True}.'
            )
        grads = [grad.reshape(-1) for grad in self._gradients()]
        return torch.cat(grads) if grads else None

    def take(self, mean: Tensor | None) -> None:
        """Put the mean of all trainers' :meth:`own` where it came from."""
        if mean is not None:
            grads = self._gradients()
            parts = torch.split(mean, [grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view_as(grad))

    def _missing(self) -> str:
        """The first parameter without a gradient; empty if there is none."""
        return next((repr(name) for name, p in self._named if p.grad is None), "")

    def _gradients(self) -> list[Tensor]:
        """Of the same parameters on every trainer: DDP gives all a gradient that one gave one."""
        return [p.grad for _, p in self._named if p.grad is not None]


def server_average(
    average_by: AverageBy,
    model: nn.Module,
    tables: RemoteTables,
    *,
    scaled: bool,
    non_finite: NonFinite,
    ddp: Mapping[str, Any],
    comm_hook: CommHook | None,
) -> ServerAverage | None:
    """What has a server average the dense gradients; None if DDP does.

    Raises:
        SpecError: if servers are asked to, and cannot.
    """
    if average_by == "ddp":
        return None
    reasons = {
        **_reasons_of_model(model, tables),
        "grad_scaler": scaled,
        "non_finite='skip'": non_finite == "skip",
        "comm_hook": comm_hook is not None,
        **{f"ddp={{'{name}': …}}": name in ddp for name in _OWN_REDUCTION},
    }
    mend = next((reason for reason, holds in reasons.items() if holds), "")
    if average_by == "servers" and mend:
        raise SpecError(f"average_by='servers' goes without {mend}. Leave out one of the two.")
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    small = 0 < size <= SMALL_BYTES and tables.ctx.num_trainers > 1
    if mend or not (small or average_by == "servers"):
        return None
    all_used = not (ddp.get("find_unused_parameters") or ddp.get("static_graph"))
    return ServerAverage(model, all_used=all_used)


def _reasons_of_model(model: nn.Module, tables: RemoteTables) -> dict[str, bool]:
    """What about a model can keep servers from averaging its dense half, and whether it does."""
    asynchronous = "async" if tables.request.staleness is None else "bounded"
    trained = [p for p in model.parameters() if p.requires_grad]
    return {
        f"consistency='{asynchronous}'": tables.request.asynchronous,
        "a model that has nothing on any server": not tables.servers,
        f"device '{tables.ctx.device}'": tables.ctx.device.type != "cpu",
        "parameters that are not all float32": any(p.dtype != torch.float32 for p in trained),
        "parameters that DDP is to ignore": bool(
            getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        ),
        "a submodule that makes sparse gradients": any(
            getattr(module, "sparse", False) is True for module in model.modules()
        ),
    }
