"""`Slab`: the shards of one kind on one server, as one matrix with one optimizer.

Shapes: R rows of the slab, N ids, B bags, U distinct rows among the ids, D columns.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.messages import WEIGHT, SlabLookup, SlabPush
from hybridpar.server.gradients import BagGradients, RunAll, joined, run_in_turn
from hybridpar.server.initial_values import fill
from hybridpar.server.kernels import add_rows, gather_rows
from hybridpar.server.rules import is_linear, needs_rows, rule_for
from hybridpar.sharding import SlabLayout
from hybridpar.specs import RemoteEmbeddingSpec


class Slab:
    """Rows of several tables under one another, read and updated together.

    Args:
        layout: which shards lie where, and how they are stored and updated.
        specs: the tables, by name.
        model_seed: what tables without a seed derive theirs from.
    """

    def __init__(
        self, layout: SlabLayout, specs: Mapping[str, RemoteEmbeddingSpec], model_seed: str
    ) -> None:
        self._kind = layout.kind
        self._settings = layout.kind.settings
        self._rule = rule_for(self._settings)
        self._linear = is_linear(self._settings)
        self._needs_rows = needs_rows(self._settings)
        self._renorm_lock = threading.Lock()
        columns = layout.kind.num_columns
        self.weight = torch.empty(layout.num_rows, columns, dtype=layout.kind.dtype)
        for part in layout.parts:
            rows = self.weight[part.first_row : part.first_row + part.num_rows]
            fill(rows, specs[part.table], part, model_seed)
        self.state = {
            name: _filled((layout.num_rows, width), self._settings.initial_state(name))
            for name, width in self._settings.state_widths(columns).items()
        }

    @property
    def clips_norm(self) -> bool:
        """Whether its gradient is scaled by a norm that spans servers."""
        return self._settings.clip_norm is not None

    def lookup(self, lookup: SlabLookup) -> Tensor:
        """The sum of each bag's rows: (B, D) float32; an empty bag gives zeros."""
        if self._kind.max_norm is not None and lookup.indices.numel():
            with self._renorm_lock:  # two trainers' lookups must not scale a row twice
                torch.embedding_renorm_(
                    self.weight, lookup.indices, self._kind.max_norm, self._kind.norm_type
                )
        if lookup.offsets is None:
            return gather_rows(self.weight, lookup.indices).float()
        if self._kind.dtype == torch.float32:
            return F.embedding_bag(lookup.indices, self.weight, lookup.offsets, mode="sum")
        rows = gather_rows(self.weight, lookup.indices).float()
        return F.embedding_bag(torch.arange(len(rows)), rows, lookup.offsets, mode="sum")

    def apply(
        self,
        pushes: Sequence[SlabPush],
        *,
        lr: float,
        divisor: int,
        t: int,
        scale: float = 1.0,
        run: RunAll = run_in_turn,
    ) -> None:
        """One optimizer step with the mean over trainers of their gradients.

        Args:
            pushes: every trainer's gradients, in rank order.
            lr: learning rate.
            divisor: what the sum of the gradients is divided by.
            t: how many steps there have been, this one included.
            scale: what the gradient is multiplied by, to clip its norm.
            run: does several independent parts of a large update, perhaps at once.
        """
        gradient = joined(pushes, divisor)
        if gradient is None:
            return
        if self._linear and self._kind.dtype == torch.float32:
            gradient.grads.mul_(-lr)
            run(lambda part: add_rows(self.weight, part.indices, part.expanded()), gradient)
        else:
            run(lambda part: self._apply_rule(part, lr, t, scale), gradient)

    def _apply_rule(self, gradient: BagGradients, lr: float, t: int, scale: float) -> None:
        rows, grads = gradient.summed()
        if scale != 1.0:
            grads.mul_(scale)
        if self._settings.clip_value is not None:
            grads.clamp_(-self._settings.clip_value, self._settings.clip_value)
        exact = self._kind.dtype == torch.float32
        old = gather_rows(self.weight, rows).float() if self._needs_rows or not exact else None
        state = {name: gather_rows(values, rows) for name, values in self.state.items()}
        change = self._rule(self._settings, old, state, grads, lr, t)
        for name, values in state.items():
            self.state[name].index_copy_(0, rows, values)
        if exact:
            add_rows(self.weight, rows, change)
        else:  # round once, after the sum
            assert old is not None
            self.weight.index_copy_(0, rows, old.add_(change).to(self._kind.dtype))

    def gradient_square(self, pushes: Sequence[SlabPush], divisor: int) -> float:
        """The squared norm of the gradient that :meth:`apply` would use."""
        gradient = joined(pushes, divisor)
        return 0.0 if gradient is None else float(gradient.summed()[1].square().sum())

    def read(self, what: str, rows: Tensor) -> Tensor:
        """Rows of the weight or of a state, as float32: (len(rows), its width)."""
        source = self.weight if what == WEIGHT else self.state[what]
        return gather_rows(source, rows).float()


def _filled(shape: tuple[int, int], value: float) -> Tensor:
    # The system hands out zeros page by page, when first touched; torch.full writes them all.
    return torch.full(shape, value) if value else torch.zeros(shape)
