"""What callbacks are told of a loop as it begins: its plan, its settings, its learning rates."""

from __future__ import annotations

import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sized
from dataclasses import fields

import torch

from hybridpar.callbacks.records import Run
from hybridpar.callbacks.servers import PlannedServer, PlannedShard, PlannedTable
from hybridpar.optim import SparseOptimizerSettings
from hybridpar.planner import row_bytes
from hybridpar.trainer.sparse_optimizer import SparseOptimizer
from hybridpar.trainer.tables import RemoteTables


def run_of(
    tables: RemoteTables,
    settings: Mapping[str, object],
    rates: Callable[[], Mapping[str, float]],
    *,
    first_epoch: int,
    epochs: int,
    steps_an_epoch: int | None,
) -> Run:
    """The record of a fit that begins now."""
    ctx, request = tables.ctx, tables.request
    consistency = "async" if request.staleness is None else "bounded"
    return Run(
        rank=ctx.rank,
        num_trainers=ctx.num_trainers,
        num_servers=ctx.num_servers,
        step=ctx.step or 0,
        first_epoch=first_epoch,
        epochs=epochs,
        steps_an_epoch=steps_an_epoch,
        attempt=ctx.attempt,
        host=socket.gethostname(),
        device=str(ctx.device),
        consistency=consistency if request.asynchronous else "sync",
        tables=planned_tables(tables),
        servers=planned_servers(tables),
        settings={name: _text(value) for name, value in settings.items() if value is not None},
        versions={
            "hybridpar": str(sys.modules["hybridpar"].__version__),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        time=time.time(),
        _rates=rates,
    )


def planned_tables(tables: RemoteTables) -> tuple[PlannedTable, ...]:
    """The plan of a model, by table."""
    found = []
    for name, placement in tables.plan.placements.items():
        spec = tables.specs[name]
        shards = placement.shards
        found.append(
            PlannedTable(
                name=name,
                num_embeddings=spec.num_embeddings,
                embedding_dim=spec.embedding_dim,
                dtype=str(spec.dtype).removeprefix("torch."),
                optimizer=_text(spec.optimizer),
                sharding=placement.sharding,
                num_bytes=sum(s.num_rows * row_bytes(spec, s.num_columns) for s in shards),
                shards=tuple(
                    PlannedShard(
                        server=f"ps{shard.server}",
                        num_rows=shard.num_rows,
                        first_column=shard.first_column,
                        num_columns=shard.num_columns,
                    )
                    for shard in shards
                ),
            )
        )
    return tuple(found)


def planned_servers(tables: RemoteTables) -> tuple[PlannedServer, ...]:
    """The plan of a model, by server."""
    plan = tables.plan
    return tuple(
        PlannedServer(
            name=f"ps{rank}",
            num_bytes=num_bytes,
            ids_a_sample=ids,
            modules=tuple(name for name, server in plan.modules.items() if server == rank),
        )
        for rank, (num_bytes, ids) in enumerate(zip(plan.num_bytes, plan.ids_a_sample, strict=True))
    )


def learning_rates(
    dense: torch.optim.Optimizer | None, sparse: SparseOptimizer | None
) -> dict[str, float]:
    """The learning rates of now, by optimizer, and by group where it has several."""
    found: dict[str, float] = {}
    groups = [] if dense is None else dense.param_groups
    for number, group in enumerate(groups):
        found["dense" if len(groups) == 1 else f"dense/{number}"] = float(group["lr"])
    groups = [] if sparse is None else sparse.param_groups
    for group in groups:
        name = "sparse" if len(groups) == 1 else f"sparse/{'+'.join(group['tables'])}"
        while name in found:  # the groups of one hosted module's optimizer
            name += "'"
        found[name] = float(group["lr"])
    return found


def steps_of(batches: object, accumulate: int) -> int | None:
    """How many steps a pass over some data takes; None if they do not say how many they are."""
    if not isinstance(batches, Sized):
        return None
    try:
        return -(-len(batches) // accumulate)
    except TypeError:  # a DataLoader over an iterable dataset
        return None


def _settings(settings: SparseOptimizerSettings) -> str:
    """The learning rate, and what is not as by default."""
    given = {
        item.name: getattr(settings, item.name)
        for item in fields(settings)
        if item.name == "lr" or getattr(settings, item.name) != item.default
    }
    inner = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return f"{type(settings).__name__}({inner})"


def _text(value: object) -> str:
    if isinstance(value, torch.optim.Optimizer):
        rates = sorted({float(group["lr"]) for group in value.param_groups})
        return f"{type(value).__name__}(lr={', '.join(f'{rate:g}' for rate in rates)})"
    if isinstance(value, SparseOptimizerSettings):
        return _settings(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_text(each)}" for name, each in value.items())
    return getattr(value, "__name__", str(value))
