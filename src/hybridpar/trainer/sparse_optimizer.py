"""`SparseOptimizer`: the tables' optimizer as a trainer sees it; the update runs on the servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor
from typing_extensions import override

from hybridpar.optim import SparseOptimizerSettings
from hybridpar.trainer.exchange import Exchange, Gradients
from hybridpar.trainer.looked_up import LookedUp
from hybridpar.trainer.tables import RemoteTables


class SparseOptimizer(torch.optim.Optimizer):
    """Steps the tables of one model; made by :meth:`HybridModel.connect`.

    A torch optimizer in that it has ``param_groups`` whose ``lr`` torch's learning-rate schedulers
    drive, and ``step`` and ``zero_grad``. Its parameters are on the servers. There is one group for
    each distinct setting, and one for each group of a hosted module's optimizer; its ``"tables"``
    names what it updates.

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

    def __init__(self, tables: RemoteTables, exchange: Exchange) -> None:
        super().__init__(_groups(tables), {"lr": 0.0})
        self._tables = tables
        self._exchange = exchange
        self._watched = 0
        self._since_step = 0
        self._when_complete: Callable[[], None] | None = None
        self._with_gradient: dict[int, LookedUp] = {}

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Push the gradients since the last step.

        In sync mode every trainer steps equally often, and this waits for all: the servers add the
        trainers' gradients in rank order, divide by their number as DDP does, and update once. In
        async and bounded mode they are applied as they arrive, and this does not wait.

        Args:
            closure: computes the loss and its gradients anew, as in torch.

        Raises:
            WaitTimeoutError: if a trainer did not step in time; names it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._exchange.push(self.gradients())
        self.pushed()
        return loss

    def pushed(self) -> None:
        """The gradients since the last step are on their way."""
        self.zero_grad()
        self._opt_called = True  # torch's schedulers warn of a step that they did not see

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that came since the last step."""
        for looked_up in self._with_gradient.values():
            looked_up.clear()
        self._with_gradient.clear()
        self._since_step = 0

    def state_of(self, table: str, name: str) -> Tensor:
        """One optimizer state of a table, a row for each logical row.

        Args:
            table: the table's name.
            name: the state's name, such as ``"sum"`` of Adagrad.

        Returns:
            (num_embeddings, width) float32 on the CPU; the width is ``embedding_dim`` or 1.
        """
        self._exchange.settle()
        return self._tables.read(table, name)

    def watch(self, looked_up: LookedUp) -> None:
        """Take note of looked-up rows as soon as a backward pass reaches them.

        Rows that no gradient reaches are not held on to: only their graph knows them.
        """
        number = self._watched
        self._watched += 1
        self._since_step += 1

        def got_gradient(looked_up: LookedUp) -> None:
            self._with_gradient[number] = looked_up
            if self._when_complete is not None and len(self._with_gradient) == self._since_step:
                self._when_complete()

        looked_up.on_gradient = got_gradient

    @contextmanager
    def when_complete(self, action: Callable[[], None] | None) -> Iterator[None]:
        """Within it, act as soon as all rows looked up since the last step have a gradient.

        That is in the midst of a backward pass, while DDP may still reduce. If the loss ignores
        some rows it never comes to it.
        """
        self._when_complete = action
        try:
            yield
        finally:
            self._when_complete = None

    def gradient_tensors(self) -> list[Tensor]:
        """The gradients since the last step, to be looked at or changed in place before it."""
        return [
            grad
            for looked_up in self._with_gradient.values()
            for grad in looked_up.gradients()
            if grad is not None
        ]

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """The gradients since the last step, each with the table's or module's name."""
        return [
            named
            for looked_up in self._with_gradient.values()
            for named in looked_up.named_gradients()
        ]

    def gradients(self, *, skip: bool = False, dense: Tensor | None = None) -> Gradients:
        """The gradients since the last step, in the order of their lookups, with the rates.

        Args:
            skip: whether nobody's are to be applied; then there is none to send.
            dense: the dense half's, if a server is to average them.
        """
        numbers = [] if skip else sorted(self._with_gradient)
        in_order = (self._with_gradient[number] for number in numbers)
        looked_up = [each for each in in_order if each.module[0] not in self._tables.frozen]
        lrs: dict[str, list[float]] = {name: [] for name in self._tables.specs}
        for group in self.param_groups:
            for table in group["tables"]:
                lrs[table].append(float(group["lr"]))
        return Gradients(looked_up, lrs, skip, dense)


def _groups(tables: RemoteTables) -> list[dict[str, Any]]:
    by_setting: dict[SparseOptimizerSettings, list[str]] = {}
    groups: list[dict[str, Any]] = []
    for name, spec in tables.specs.items():
        if isinstance(spec.optimizer, SparseOptimizerSettings):
            by_setting.setdefault(spec.optimizer, []).append(name)
        else:
            groups += [_group((name,), lr) for lr in tables.module_lrs[name]]
    groups = [_group(tuple(names), s.lr) for s, names in by_setting.items()] + groups
    return groups or [_group((), 0.0)]


def _group(names: tuple[str, ...], lr: float) -> dict[str, Any]:
    stand_in = torch.nn.Parameter(torch.empty(0))  # Optimizer insists on a tensor
    return {"params": [stand_in], "tables": names, "lr": lr}
