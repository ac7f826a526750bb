"""`SparseOptimizer`: the tables' optimizer as a trainer sees it; the update runs on the servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor
from typing_extensions import override

from hybridpar.messages import Pooled, SlabLookup, SlabPush, TurnAnswer
from hybridpar.trainer.routing import RoutedBatch
from hybridpar.trainer.tables import Gradient, RemoteTables


class SparseOptimizer(torch.optim.Optimizer):
    """Steps the tables of one model; made by :meth:`HybridModel.connect`.

    A torch optimizer in that it has ``param_groups`` whose ``lr`` torch's learning-rate schedulers
    drive, and ``step`` and ``zero_grad``. Its parameters, the tables, are on the servers.

    Example:
        >>> def train(ctx):
        ...     model = Recommender()
        ...     sparse_optimizer = model.connect(ctx, hybridpar.optim.SGD(lr=0.05))
        ...     schedule = torch.optim.lr_scheduler.StepLR(sparse_optimizer, step_size=100)
        ...     for batch in my_batches(ctx.rank):
        ...         model(model.lookup(batch), batch).mean().backward()
        ...         sparse_optimizer.step()
        ...         schedule.step()
    """

    def __init__(self, tables: RemoteTables) -> None:
        stand_in = torch.nn.Parameter(torch.empty(0))  # Optimizer insists on a tensor
        super().__init__([stand_in], {"lr": tables.settings.lr})
        self._tables = tables
        self._watched = 0
        self._with_gradient: dict[int, tuple[int, int, SlabLookup, Tensor]] = {}

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Push the gradients since the last step, and wait for the servers to step.

        Collective in sync mode: every trainer steps equally often. The servers add the trainers'
        gradients in rank order, divide by their number as DDP does, and update once.

        Args:
            closure: computes the loss and its gradients anew, as in torch.

        Raises:
            WaitTimeoutError: if a trainer did not step in time; names it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.push(None, more=True)
        return loss

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that came since the last step."""
        for *_, leaf in self._with_gradient.values():
            leaf.grad = None
        self._with_gradient.clear()

    def state_of(self, table: str, name: str) -> Tensor:
        """One optimizer state of a table, a row for each logical row.

        Args:
            table: the table's name.
            name: the state's name, such as ``"sum"`` of Adagrad.

        Returns:
            (num_embeddings, width) float32 on the CPU; the width is ``embedding_dim`` or 1.
        """
        return self._tables.read(table, name)

    def watch(self, server: int, slab: int, lookup: SlabLookup, leaf: Tensor) -> None:
        """Take note of looked-up rows as soon as a backward pass reaches them.

        Rows that no gradient reaches are not held on to: only the graph's own leaf holds the hook.
        """
        number = self._watched
        self._watched += 1

        def got_gradient(leaf: Tensor) -> None:
            self._with_gradient[number] = server, slab, lookup, leaf

        leaf.register_post_accumulate_grad_hook(got_gradient)  # type: ignore[no-untyped-call]

    def push(self, following: RoutedBatch | None, *, more: bool) -> tuple[list[Pooled], TurnAnswer]:
        """Push the gradients, and in the same call look up the rows of the batch that follows.

        Args and returns: see :meth:`RemoteTables.update`.
        """
        gradients: list[Gradient] = []
        for _, (server, slab, lookup, leaf) in sorted(self._with_gradient.items()):
            if leaf.grad is not None:
                gradients.append((server, slab, SlabPush(lookup, leaf.grad)))
        lr = float(self.param_groups[0]["lr"])
        answer = self._tables.update(gradients, lr, following, more=more)
        self.zero_grad()
        return answer
