"""`HostedModule`: a user's module on a server, its graphs kept until their gradients come."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridpar.errors import SpecError
from hybridpar.messages import ModuleCall, ModulePush
from hybridpar.server.initial_values import seed_from, seeded
from hybridpar.specs import RemoteEmbeddingSpec

_RANDOM_LOCK = threading.Lock()  # torch's global generator, between the modules of a process


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

    def __init__(self, spec: RemoteEmbeddingSpec, model_seed: str) -> None:
        self._name = spec.name
        assert spec.module is not None
        with seeded(spec, model_seed):
            self._module = spec.module(*spec.args, **spec.kwargs)
        if not isinstance(self._module, nn.Module):
            raise SpecError(
                f"Module '{spec.name}' was built as a {type(self._module).__name__}. Give a class "
                "of torch.nn.Module, or a function that returns one."
            )
        self._optimizer = self._build_optimizer(spec)
        fresh = None if self._optimizer is None else self._optimizer.state_dict()
        self._fresh = copy.deepcopy(fresh)
        self._seed = f"{model_seed}/{spec.name}"
        self._graphs: dict[tuple[int, int], Tensor] = {}  # by rank and call
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

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters, its buffers and its optimizer's state."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        if self._optimizer is not None:
            for state in self._optimizer.state.values():
                tensors += [value for value in state.values() if isinstance(value, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def forward(self, rank: int, call: ModuleCall) -> Tensor:
        """The module's output for one trainer's inputs; the graph is kept if the call asks it.

        What the module draws (dropout, say) depends on the trainer and the call, not on which
        trainer came first. BatchNorm's running averages do follow the order of arrival.
        """
        with (
            self._lock,
            _RANDOM_LOCK,
            torch.set_grad_enabled(call.keep),
            torch.random.fork_rng([]),
        ):
            torch.manual_seed(seed_from(self._seed, rank, call.number))
            self._module.train(call.train)
            output = self._module(*call.inputs)
            if not isinstance(output, Tensor):
                raise SpecError(
                    f"Module '{self._name}' returned a {type(output).__name__}. Return one tensor."
                )
            if output.requires_grad:
                self._graphs[rank, call.number] = output
        return output.detach()

    def release(self, rank: int, call: int) -> None:
        """Drop the graph of a call whose output its trainer has let go."""
        with self._lock:
            self._graphs.pop((rank, call), None)

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
                    output = self._graphs.pop((rank, push.call), None)
                    if output is not None:  # else it has no parameter that learns
                        output.backward(push.grad / divisor)  # type: ignore[no-untyped-call]
                        any_came = True
            if any_came and self._optimizer is not None:
                for group, lr in zip(self._optimizer.param_groups, lrs, strict=True):
                    group["lr"] = lr
                for parameter, stepped in zip(self._parameters, self._stepped, strict=True):
                    stepped.grad, parameter.grad = parameter.grad, None
                self._optimizer.step()

    def state_dict(self) -> dict[str, Tensor]:
        """The module's parameters and buffers."""
        state = self._module.state_dict()
        with self._lock:  # not while a step writes them
            return {name: value.detach().clone() for name, value in state.items()}

    def replace(self, state: dict[str, Tensor]) -> None:
        """Take other parameters and buffers; the optimizer is as at the beginning again."""
        with self._lock:
            self._module.load_state_dict(state)  # in place: the optimizer sees it
            if self._optimizer is not None:
                assert self._fresh is not None
                self._optimizer.load_state_dict(copy.deepcopy(self._fresh))

    def checkpoint(self) -> dict[str, Any]:
        """What :meth:`restore` takes."""
        optimizer = None if self._optimizer is None else self._optimizer.state_dict()
        return {"module": self.state_dict(), "optimizer": copy.deepcopy(optimizer)}

    def restore(self, state: dict[str, Any], *, optimizer: bool) -> None:
        """Be as a module of a checkpoint was, its optimizer's state too if asked for."""
        with self._lock:
            self._module.load_state_dict(state["module"])  # in place: the optimizer sees it
            if optimizer and self._optimizer is not None:
                self._optimizer.load_state_dict(state["optimizer"])
