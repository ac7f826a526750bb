"""From a placement and a dry run to the numbers of a `PlanReport`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpar.planner import row_bytes
from hybridpar.planning.dry_run import Asked, DryRun
from hybridpar.planning.report import ServerPlan, TablePlan, TrainerPlan
from hybridpar.server.hosted import HostedModule
from hybridpar.sharding import Plan
from hybridpar.specs import RemoteEmbeddingSpec
from hybridpar.trainer.model import HybridModel

_TOP = 0.01


def table_plans(
    specs: Sequence[RemoteEmbeddingSpec], placed: Plan, run: DryRun,
    modules: dict[str, HostedModule],
) -> tuple[TablePlan, ...]:  # fmt: skip
    """Where each table and hosted module is, and what the sample asks of it."""
    tables = []
    for spec in specs:
        if spec.module is not None:
            tables.append(
                TablePlan(
                    name=spec.name, sharding="module", why="modules go round the servers",
                    servers=(placed.modules[spec.name],), num_bytes=modules[spec.name].num_bytes,
                )
            )  # fmt: skip
            continue
        placement = placed.placements[spec.name]
        batches = run.ids.get(spec.name, [])
        count = sum(ids.numel() for ids in batches)
        sizes = [row_bytes(spec, shard.num_columns) * shard.num_rows for shard in placement.shards]
        table = TablePlan(
            name=spec.name, sharding=placement.sharding, why=placement.why,
            servers=tuple(shard.server for shard in placement.shards), num_bytes=sum(sizes),
        )  # fmt: skip
        if run.steps:
            table = TablePlan(
                name=table.name, sharding=table.sharding, why=table.why, servers=table.servers,
                num_bytes=table.num_bytes,
                ids_a_step=count / run.steps,
                pooling_factor=count / max(1, run.bags.get(spec.name, 0)),
                unique_share=sum(map(_distinct, batches)) / max(1, count),
                top_share=_top_share(batches),
            )  # fmt: skip
        tables.append(table)
    return tuple(tables)


def _distinct(ids: Tensor) -> int:
    return int(torch.unique(ids).numel())


def _top_share(batches: Sequence[Tensor]) -> float:
    """What part of all ids the most frequent hundredth of the distinct ones makes up."""
    if not sum(ids.numel() for ids in batches):
        return 0.0
    _, counts = torch.unique(torch.cat(list(batches)), return_counts=True)
    top = counts.sort(descending=True).values[: max(1, int(len(counts) * _TOP))]
    return int(top.sum()) / int(counts.sum())


def server_plans(
    placed: Plan, run: DryRun, modules: dict[str, HostedModule], gbit: float
) -> tuple[ServerPlan, ...]:
    """What each server holds and does."""
    asked = [run.asked_in(step) for step in range(run.steps)]
    servers = []
    for rank, slabs in enumerate(placed.slabs):
        weight = sum(
            slab.num_rows * slab.kind.num_columns * slab.kind.dtype.itemsize for slab in slabs
        )
        hosted = [modules[name].num_bytes for name, on in placed.modules.items() if on == rank]
        sizes = {"rank": rank, "weight_bytes": weight,
                 "state_bytes": placed.num_bytes[rank] - weight,
                 "module_bytes": sum(hosted)}  # fmt: skip
        if not run.steps:
            servers.append(ServerPlan(**sizes))
            continue
        received = sum(sent[rank] for sent in run.sent) / run.steps
        sent = sum(received[rank] for received in run.received) / run.steps
        ids, rows = _loads(asked, rank)
        servers.append(
            ServerPlan(
                **sizes,
                ids_a_step=ids,
                rows_a_step=rows,
                received_a_step=received,
                sent_a_step=sent,
                network_s=_link_seconds(max(received, sent), gbit),
                update_s=run.server_s[rank],
            )
        )
    return tuple(servers)


def _link_seconds(num_bytes: float, gbit: float) -> float:
    """How long a link takes over some bytes."""
    return num_bytes * 8 / (gbit * 1e9)


def _loads(asked: Sequence[Asked], server: int) -> tuple[float, float]:
    """The ids that a server is asked for in a step, and the distinct rows among them."""
    of_server = [
        torch.cat([lookup.indices for lookup in lookups])
        for step in asked
        for (rank, _), lookups in step.items()
        if rank == server
    ]
    ids = sum(indices.numel() for indices in of_server)
    return ids / len(asked), sum(map(_distinct, of_server)) / len(asked)


def trainer_plan(
    model: HybridModel[Any] | None, run: DryRun, trainers: int, gbit: float
) -> TrainerPlan:
    """What the busiest trainer does."""
    dense = None
    if model is not None:
        trained = [p for p in model.parameters() if p.requires_grad]
        dense = sum(p.numel() * p.element_size() for p in trained)
    if not run.steps:
        return TrainerPlan(dense_bytes=dense)
    sent = max(map(sum, run.sent)) / run.steps
    received = max(map(sum, run.received)) / run.steps
    ring = 0.0 if run.averaged else 2 * (trainers - 1) / trainers * (dense or 0)
    return TrainerPlan(
        dense_bytes=dense,
        sent_a_step=sent,
        received_a_step=received,
        all_reduced_a_step=ring,
        network_s=_link_seconds(max(sent, received) + ring, gbit),
        compute_s=min(run.step_s) if run.step_s else None,
    )
