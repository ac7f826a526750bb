"""`HostedModule`: a user's module on a server, its graphs kept until their gradients come."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridpar.errors import SpecError
from hybridpar.messages import ModuleCall, ModulePush
from hybridpar.server.initial_values import seeded
from hybridpar.specs import RemoteEmbeddingSpec

_KEPT_UPDATES = 2  # a graph whose trainer has pushed this often since will get no gradient


class _Graph(NamedTuple):
    output: Tensor
    made_at: int


class HostedModule:
    """Runs a module's forward for the trainers, its backward for their gradients, and its steps.

    Where updates are applied on arrival, a gradient may come for a forward that later updates have
    overtaken. Its backward then goes through the activations of the forward and the weights of now.

    Args:
        spec: says how to build the module and its optimizer.
        model_seed: what modules without a seed derive theirs from.

    Raises:
        SpecError: if what the spec builds is no module or no optimizer.
    """

    def __init__(self, spec: RemoteEmbeddingSpec, model_seed: int) -> None:
        self._name = spec.name
        assert spec.module is not None
        with seeded(spec, model_seed):
            self._module = spec.module(*spec.args, **spec.kwargs)
        if not isinstance(self._module, nn.Module):
            raise SpecError(f"Module '{spec.name}' was built as a {type(self._module).__name__}.")
        self._optimizer = self._build_optimizer(spec)
        self._graphs: dict[tuple[int, int], _Graph] = {}  # by rank and call
        self._updates: dict[int, int] = {}  # by rank
        self._lock = threading.Lock()  # one forward or backward at a time

    def _build_optimizer(self, spec: RemoteEmbeddingSpec) -> torch.optim.Optimizer | None:
        build = spec.optimizer
        self._parameters = [p for p in self._module.parameters() if p.requires_grad]
        # The optimizer steps the same memory by tensors of its own: so no step makes a graph that
        # still waits for its gradient complain of weights changed in place.
        parameters = [nn.Parameter(p.data) for p in self._parameters]
        self._stepped = parameters
        if not parameters:
            return None
        assert callable(build)
        optimizer: object = build(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise SpecError(
                f"Module '{spec.name}': its optimizer was built as {optimizer!r}. Give a function "
                "from parameters to a torch optimizer, such as torch.optim.Adam."
            )
        return optimizer

    @property
    def lrs(self) -> list[float]:
        """The learning rates of its optimizer's groups."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [float(group["lr"]) for group in groups]

    def forward(self, rank: int, call: ModuleCall) -> Tensor:
        """The module's output for one trainer's inputs; the graph is kept if the call asks it."""
        keeps = call.call is not None
        with self._lock, torch.set_grad_enabled(keeps):
            self._module.train(call.train)
            output = self._module(*call.inputs)
            if not isinstance(output, Tensor):
                raise SpecError(
                    f"Module '{self._name}' returned a {type(output).__name__}. Return one tensor."
                )
            if keeps and output.requires_grad:
                assert call.call is not None
                self._graphs[rank, call.call] = _Graph(output, self._updates.get(rank, 0))
        return output.detach()

    def apply(
        self, pushes: Sequence[tuple[int, Sequence[ModulePush]]], divisor: int, lrs: list[float]
    ) -> None:
        """Run backward for every trainer's gradients in rank order, then one optimizer step.

        Args:
            pushes: for each trainer that took part, its rank and its gradients for this module.
            divisor: what the sum of the gradients is divided by.
            lrs: learning rates of the optimizer's groups.
        """
        with self._lock:
            any_came = False
            for rank, gradients in pushes:
                for push in gradients:
                    graph = self._graphs.pop((rank, push.call), None)
                    if graph is not None:
                        graph.output.backward(push.grad / divisor)  # type: ignore[no-untyped-call]
                        any_came = True
                self._forget(rank)
            if any_came and self._optimizer is not None:
                for group, lr in zip(self._optimizer.param_groups, lrs, strict=True):
                    group["lr"] = lr
                for parameter, stepped in zip(self._parameters, self._stepped, strict=True):
                    stepped.grad, parameter.grad = parameter.grad, None
                self._optimizer.step()

    def _forget(self, rank: int) -> None:
        """Count a trainer's update, and drop its graphs that the loss did not use."""
        done = self._updates[rank] = self._updates.get(rank, 0) + 1
        stale = [
            key
            for key, graph in self._graphs.items()
            if key[0] == rank and done - graph.made_at >= _KEPT_UPDATES
        ]
        for key in stale:
            del self._graphs[key]

    def state_dict(self) -> dict[str, Tensor]:
        """The module's parameters and buffers."""
        return {name: value.detach() for name, value in self._module.state_dict().items()}
