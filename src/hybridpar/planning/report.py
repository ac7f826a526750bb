"""`PlanReport`: what a model would cost on a cluster, as numbers; printed by `text`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from hybridpar.planning.text import written


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePlan:
    """One table or hosted module of a plan.

    Attributes:
        name: its name.
        sharding: ``"table_wise"``, ``"row_wise"``, ``"column_wise"``, or ``"module"``.
        why: why so, in words.
        servers: the ranks of the servers that hold some of it.
        num_bytes: bytes of weights and optimizer state, on all of them.
        ids_a_step: ids that all trainers together look up in a step; None without a sample, as
            everything below.
        pooling_factor: ids a bag; ids a sample if the table does not pool.
        unique_share: distinct ids of a trainer's batch, divided by its ids.
        top_share: the part of all ids that the most frequent 1 % of the distinct ids make up.
    """

    name: str
    sharding: str
    why: str
    servers: tuple[int, ...]
    num_bytes: int
    ids_a_step: float | None = None
    pooling_factor: float | None = None
    unique_share: float | None = None
    top_share: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerPlan:
    """One server of a plan.

    Attributes:
        rank: its rank.
        weight_bytes: bytes of the tables' rows.
        state_bytes: bytes of their optimizers' state.
        module_bytes: bytes of hosted modules, with their optimizers' state after a step.
        ids_a_step: ids that all trainers together ask it for in a step; None without a sample, as
            everything below.
        rows_a_step: distinct rows among them, which the update changes.
        received_a_step: bytes that all trainers together send it in a step.
        sent_a_step: bytes that it answers.
        network_s: seconds a step that the larger of the two takes on its link.
        update_s: seconds a step that lookups and update take, at the speed measured here.
    """

    rank: int
    weight_bytes: int
    state_bytes: int
    module_bytes: int
    ids_a_step: float | None = None
    rows_a_step: float | None = None
    received_a_step: float | None = None
    sent_a_step: float | None = None
    network_s: float | None = None
    update_s: float | None = None

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return self.weight_bytes + self.state_bytes + self.module_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerPlan:
    """What a trainer does in a step, the busiest if they differ.

    Attributes:
        dense_bytes: bytes of the dense half's trainable parameters; None if it is not known.
        sent_a_step: bytes it sends to all servers together; None without a sample, as everything
            below.
        received_a_step: bytes that come from them.
        all_reduced_a_step: bytes it sends, and receives, for DDP's ring all-reduce; 0 if a server
            averages the dense gradients, which are among the bytes above then.
        network_s: seconds a step that its link is busy in its busier direction.
        compute_s: seconds a step of its own work, at the speed measured here: routing ids, forward
            and backward, making messages. Without the model, all but the dense half.
    """

    dense_bytes: int | None
    sent_a_step: float | None = None
    received_a_step: float | None = None
    all_reduced_a_step: float | None = None
    network_s: float | None = None
    compute_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """What a model would cost on a cluster; made by :func:`hybridpar.plan`. ``print`` shows it.

    Attributes:
        trainers: how many there would be.
        servers: for each server, what it holds and does.
        tables: for each table and hosted module, where it is and why.
        trainer: what one trainer does.
        steps: how many steps of the sample the numbers a step are means of; 0 without a sample.
        consistency: ``"sync"``, ``"async"`` or ``"bounded"``.
        wire_dtype: what rows and gradients are sent as.
        gbit: the speed assumed of every machine's link, each way.
        memory_bytes: memory that each server may take; None if it is not known.
        skew: ids of the most loaded server, divided by the mean; bytes without a sample.
        bottleneck: what takes longest in a step: ``"memory"``, ``"network"``, ``"servers"`` or
            ``"trainers"``; None if only a sample could tell.
        why: why so, in words.
    """

    trainers: int
    servers: tuple[ServerPlan, ...]
    tables: tuple[TablePlan, ...]
    trainer: TrainerPlan
    steps: int
    consistency: str
    wire_dtype: str
    gbit: float
    memory_bytes: int | None
    skew: float
    bottleneck: str | None
    why: str

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, each server's ``num_bytes`` included."""
        values = dataclasses.asdict(self)
        for server, plain in zip(self.servers, values["servers"], strict=True):
            plain["num_bytes"] = server.num_bytes
        return values

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    @override
    def __str__(self) -> str:
        return written(self)
