"""`Slab`: the shards of one embedding_dim on one server, as one matrix with one optimizer.

Shapes: R rows of the slab, N ids, B bags, D columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.features import bag_lengths
from hybridpar.messages import SlabLookup, SlabPush
from hybridpar.optim import SparseOptimizerSettings
from hybridpar.server.initial_values import fill
from hybridpar.server.kernels import gather_rows
from hybridpar.server.rules import BagGradients, rule_for
from hybridpar.sharding import SlabLayout
from hybridpar.specs import RemoteEmbeddingSpec

WEIGHT = "weight"


class Slab:
    """Rows of several tables under one another, read and updated together.

    Args:
        layout: which shards lie where.
        specs: the tables, by name.
        settings: the sparse optimizer.
        model_seed: what tables without a seed derive theirs from.
    """

    def __init__(
        self,
        layout: SlabLayout,
        specs: Mapping[str, RemoteEmbeddingSpec],
        settings: SparseOptimizerSettings,
        model_seed: int,
    ) -> None:
        self.weight = torch.empty(layout.num_rows, layout.embedding_dim)
        for part in layout.parts:
            rows = self.weight[part.first_row : part.first_row + part.num_rows]
            fill(rows, specs[part.table], part, model_seed)
        self.state = {
            name: torch.full((layout.num_rows, width), settings.initial_state(name))
            for name, width in settings.state_widths(layout.embedding_dim).items()
        }
        self._rule = rule_for(settings)

    def lookup(self, lookup: SlabLookup) -> Tensor:
        """The sum of each bag's rows: (B, D) float32; an empty bag gives zeros."""
        if lookup.offsets is None:
            return gather_rows(self.weight, lookup.indices)
        return F.embedding_bag(lookup.indices, self.weight, lookup.offsets, mode="sum")

    def apply(self, pushes: Sequence[SlabPush], lr: float, num_trainers: int) -> None:
        """One optimizer step with the mean over trainers of their gradients.

        Args:
            pushes: every trainer's gradients, in rank order.
            lr: learning rate.
            num_trainers: what the sum is divided by.
        """
        pushes = [push for push in pushes if push.lookup.indices.numel()]
        if pushes:
            self._rule.update(self.weight, self.state, _joined(pushes, num_trainers), lr)

    def read(self, what: str, rows: Tensor) -> Tensor:
        """Rows of the weight or of a state: (len(rows), its width)."""
        source = self.weight if what == WEIGHT else self.state[what]
        return gather_rows(source, rows)


def _joined(pushes: Sequence[SlabPush], num_trainers: int) -> BagGradients:
    """Several pushes as one, divided by the number of trainers as DDP divides."""
    indices = torch.cat([push.lookup.indices for push in pushes])
    grads = torch.cat([push.grads for push in pushes])
    if num_trainers > 1:
        grads.div_(num_trainers)
    if all(push.lookup.offsets is None for push in pushes):
        return BagGradients(indices, None, grads)
    lengths = torch.cat([_lengths(push.lookup) for push in pushes])
    bags = torch.arange(grads.shape[0]).repeat_interleave(lengths, output_size=indices.numel())
    return BagGradients(indices, bags, grads)


def _lengths(lookup: SlabLookup) -> Tensor:
    if lookup.offsets is None:
        return torch.ones_like(lookup.indices)
    return bag_lengths(lookup.offsets, lookup.indices.numel())
