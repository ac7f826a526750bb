"""`Slab`: the shards of one kind on one server, as one matrix with one optimizer.

Shapes: R rows of the slab, N ids, B bags, U distinct rows among the ids, D columns.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.features import bag_lengths
from hybridpar.messages import WEIGHT, SlabLookup, SlabPush
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
        self, pushes: Sequence[SlabPush], *, lr: float, divisor: int, t: int, scale: float = 1.0
    ) -> None:
        """One optimizer step with the mean over trainers of their gradients.

        Args:
            pushes: every trainer's gradients, in rank order.
            lr: learning rate.
            divisor: what the sum of the gradients is divided by.
            t: how many steps there have been, this one included.
            scale: what the gradient is multiplied by, to clip its norm.
        """
        gradient = _joined(pushes, divisor)
        if gradient is None:
            return
        if self._linear and self._kind.dtype == torch.float32:
            gradient.grads.mul_(-lr)
            add_rows(self.weight, gradient.indices, gradient.expanded())
            return
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
        gradient = _joined(pushes, divisor)
        return 0.0 if gradient is None else float(gradient.summed()[1].square().sum())

    def read(self, what: str, rows: Tensor) -> Tensor:
        """Rows of the weight or of a state, as float32: (len(rows), its width)."""
        source = self.weight if what == WEIGHT else self.state[what]
        return gather_rows(source, rows).float()

    def write(self, what: str, rows: Tensor, values: Tensor) -> None:
        """Set rows of the weight or of a state."""
        target = self.weight if what == WEIGHT else self.state[what]
        target.index_copy_(0, rows, values.to(target.dtype))


def _filled(shape: tuple[int, int], value: float) -> Tensor:
    # The system hands out zeros page by page, when first touched; torch.full writes them all.
    return torch.full(shape, value) if value else torch.zeros(shape)


class _BagGradients(NamedTuple):
    """The gradient of a sum-pooled lookup, before it is expanded to rows.

    ``indices`` (N,) are rows of the slab, repeats allowed; ``bags`` (N,) says for each which row of
    ``grads`` (B, D) is its gradient, None that it is the one of the same number.
    """

    indices: Tensor
    bags: Tensor | None
    grads: Tensor

    def expanded(self) -> Tensor:
        """A gradient row for each id: (N, D)."""
        return self.grads if self.bags is None else gather_rows(self.grads, self.bags)

    def summed(self) -> tuple[Tensor, Tensor]:
        """The distinct rows (U,), and the sum of each one's gradients (U, D).

        Repeats are summed in the order of ``indices``, whatever the number of threads.
        """
        ordered, order = torch.sort(self.indices, stable=True)
        rows, counts = torch.unique_consecutive(ordered, return_counts=True)
        bags = order if self.bags is None else self.bags[order]
        starts = counts.cumsum(0) - counts
        return rows, F.embedding_bag(bags, self.grads, starts, mode="sum")


def _joined(pushes: Sequence[SlabPush], divisor: int) -> _BagGradients | None:
    """Several pushes as one, divided as DDP divides; None if they hold no id."""
    parts = [
        (push.lookup, push.grads)
        for push in pushes
        if isinstance(push.lookup, SlabLookup) and push.lookup.indices.numel()
    ]
    if not parts:
        return None
    indices = torch.cat([lookup.indices for lookup, _ in parts])
    grads = torch.cat([own for _, own in parts])
    if divisor > 1:
        grads.div_(divisor)
    if all(lookup.offsets is None for lookup, _ in parts):
        return _BagGradients(indices, None, grads)
    lengths = torch.cat([_lengths(lookup) for lookup, _ in parts])
    bags = torch.arange(grads.shape[0]).repeat_interleave(lengths, output_size=indices.numel())
    return _BagGradients(indices, bags, grads)


def _lengths(lookup: SlabLookup) -> Tensor:
    if lookup.offsets is None:
        return torch.ones_like(lookup.indices)
    return bag_lengths(lookup.offsets, lookup.indices.numel())
