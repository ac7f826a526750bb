"""What trainers, servers and the master say to each other.

Shapes: N ids, B bags, D columns, U rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from hybridpar.optim import SparseOptimizerSettings
from hybridpar.sharding import Plan, SlabLayout
from hybridpar.specs import RemoteEmbeddingSpec


@dataclass(frozen=True, slots=True)
class SlabLookup:
    """Bags of rows of one slab.

    Attributes:
        indices: (N,) int64 rows of the slab.
        offsets: (B,) int64 start of each bag, or None if every bag is one id.
    """

    indices: Tensor
    offsets: Tensor | None


@dataclass(frozen=True, slots=True)
class SlabPush:
    """The gradient of one earlier lookup: ``lookup``'s bags, and (B, D) float32 ``grads``."""

    lookup: SlabLookup
    grads: Tensor


Lookups: TypeAlias = tuple[SlabLookup | None, ...]
"""One trainer's lookups of one step on one server: one a slab, None where it needs no row."""

Pooled: TypeAlias = tuple[Tensor | None, ...]
"""The answer: for each slab, the (B, D) sums of the bags, None where nothing was asked."""

Pushes: TypeAlias = tuple[tuple[SlabPush, ...], ...]
"""One trainer's gradients of one step for one server: for each slab, one push a lookup."""


@dataclass(frozen=True, slots=True)
class Update:
    """One trainer's part of one training step, on one server.

    Attributes:
        pushes: its gradients.
        lrs: for each slab, the learning rate in force.
    """

    pushes: Pushes
    lrs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One trainer's part in one round that all trainers join; each server gathers it.

    Attributes:
        rank: the trainer's rank.
        epoch: counts the passes over the data, from 1.
        step: counts the rounds of an epoch: 0 opens it, with nothing to push.
        update: the gradients of the step just computed; None when opening an epoch.
        lookups: the rows wanted back, for the trainer's next step.
        more: whether this trainer takes part in the next round of the epoch.
    """

    rank: int
    epoch: int
    step: int
    update: Update | None
    lookups: Lookups
    more: bool


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """What a server answers to a turn, once all have come and the update is applied.

    Attributes:
        pooled: the rows asked for, after the update.
        joined: ranks that were in this round.
        active: ranks that take part in the next round of the epoch.
    """

    pooled: Pooled
    joined: tuple[int, ...]
    active: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What a trainer tells the master of the model it built."""

    rank: int
    specs: tuple[RemoteEmbeddingSpec, ...]
    settings: SparseOptimizerSettings
    seed: int


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """What the master answers: the number it gave the model, and where its tables are."""

    model_id: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the master tells one server to hold."""

    model_id: int
    specs: tuple[RemoteEmbeddingSpec, ...]
    layouts: tuple[SlabLayout, ...]
    settings: SparseOptimizerSettings
    seed: int
    num_trainers: int
