"""What trainers, servers and the master say to each other.

What is said in every step is a named tuple: of Python's records the fastest to pickle.

Shapes: N ids, B bags, D columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpar.sharding import Plan, SlabLayout
from hybridpar.specs import RemoteEmbeddingSpec

REMEMBERED = 2  # so many of a trainer's lookups for a step does a server keep for their gradients
WEIGHT = "weight"  # what is read of a slab, beside the names of its optimizer's states


class SlabLookup(NamedTuple):
    """Bags of rows of one slab.

    Attributes:
        indices: (N,) int64 rows of the slab.
        offsets: (B,) int64 start of each bag, or None if every bag is one id.
    """

    indices: Tensor
    offsets: Tensor | None


class ModuleCall(NamedTuple):
    """One forward of a hosted module.

    Attributes:
        module: its name.
        feature: what the output is for.
        inputs: the forward's arguments, on the CPU.
        train: whether in training mode.
        number: counts this trainer's calls that train or keep; 0 for another.
        keep: whether the graph is kept, under that number, for a gradient that may come.
    """

    module: str
    feature: str
    inputs: tuple[Tensor, ...]
    train: bool
    number: int
    keep: bool


class Lookups(NamedTuple):
    """What one trainer wants of one server for one batch.

    Attributes:
        rank: the trainer's rank.
        number: counts the trainer's batches.
        slabs: one lookup a slab, None where it needs no row.
        modules: the forwards.
        released: modules' names and earlier calls of theirs that will get no gradient any more.
    """

    rank: int
    number: int
    slabs: tuple[SlabLookup | None, ...]
    modules: tuple[ModuleCall, ...] = ()
    released: tuple[tuple[str, int], ...] = ()


class Pooled(NamedTuple):
    """The answer to `Lookups`.

    Attributes:
        slabs: for each slab the (B, D) sums of the bags, in the model's wire dtype; None where
            nothing was asked.
        modules: the forwards' outputs.
        behind: how many steps of the slowest trainer the rows lack; 0 in sync mode.
    """

    slabs: tuple[Tensor | None, ...]
    modules: tuple[Tensor, ...] = ()
    behind: int = 0


class SlabPush(NamedTuple):
    """The gradient of one earlier lookup of a slab.

    Attributes:
        lookup: its bags; or, if the server still remembers it, the number of the `Lookups` that it
            was in.
        grads: (B, D) float32, or the model's wire dtype.
    """

    lookup: SlabLookup | int
    grads: Tensor


class ModulePush(NamedTuple):
    """The gradient of one earlier forward's output."""

    module: str
    call: int
    grad: Tensor


class Update(NamedTuple):
    """One trainer's part of one training step, on one server.

    Attributes:
        slabs: for each slab, the gradients: one push a lookup.
        modules: the gradients of hosted modules' outputs.
        lrs: for each slab, the learning rate in force.
        module_lrs: for each hosted module, the learning rates of its optimizer's groups.
        scales: for each slab, what its gradient is multiplied by before the rule; None for 1.
        skip: whether this trainer asks that nobody's gradients of this step be applied.
    """

    slabs: tuple[tuple[SlabPush, ...], ...]
    modules: tuple[ModulePush, ...]
    lrs: tuple[float, ...]
    module_lrs: dict[str, list[float]]
    scales: tuple[float, ...] | None = None
    skip: bool = False


class Turn(NamedTuple):
    """One trainer's part in one round that all trainers join.

    Attributes:
        rank: the trainer's rank.
        epoch: counts the passes over the data, from 1; 0 in a loop by hand.
        step: counts the rounds of an epoch; 0 opens it, with nothing to push.
        more: whether this trainer takes part in the next round of the epoch.
        update: the gradients of the step just computed; None when opening an epoch.
        lookups: the rows wanted back, for the trainer's next step.
        dense: the gradients of the trainer's dense half, (values,) float32, to be averaged.
    """

    rank: int
    epoch: int
    step: int
    more: bool
    update: Update | None = None
    lookups: Lookups | None = None
    dense: Tensor | None = None


class TurnAnswer(NamedTuple):
    """The answer to a turn, once all have come and the update is applied.

    Attributes:
        joined: ranks that were in this round.
        active: ranks that take part in the next round of the epoch.
        pooled: the rows asked for, after the update.
        dense: the mean of the trainers' dense gradients, in rank order.
    """

    joined: tuple[int, ...]
    active: tuple[int, ...]
    pooled: Pooled | None = None
    dense: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What a trainer tells the master of the model it built.

    Attributes:
        rank: the trainer's rank.
        specs: the tables, each with its optimizer filled in, and the modules.
        seed: what tables without a seed of their own derive theirs from.
        asynchronous: whether gradients are applied on arrival.
        staleness: how many steps the rows may be behind; None for no bound.
        divide: whether a gradient applied on arrival is divided by the number of trainers.
        wire_dtype: what rows and gradients are sent as.
    """

    rank: int
    specs: tuple[RemoteEmbeddingSpec, ...]
    seed: int
    asynchronous: bool = False
    staleness: int | None = None
    divide: bool = True
    wire_dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """What the master answers.

    Attributes:
        model_id: the number it gave the model.
        plan: where its tables are.
        module_lrs: for each hosted module, the learning rates of its optimizer's groups.
    """

    model_id: int
    plan: Plan
    module_lrs: dict[str, list[float]] = field(default_factory=dict)


class Room(NamedTuple):
    """What a server says of the memory it may take.

    Attributes:
        machine: what it shares that memory with: servers of an equal machine.
        num_bytes: bytes that are left; None if the system does not tell.
    """

    machine: str
    num_bytes: int | None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the master tells one server to hold."""

    model_id: int
    specs: tuple[RemoteEmbeddingSpec, ...]
    layouts: tuple[SlabLayout, ...]
    modules: tuple[str, ...]
    request: ModelRequest
    num_trainers: int
