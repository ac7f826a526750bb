"""`plan`: bytes, traffic and the bottleneck of a model on a cluster that is not there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hybridpar.errors import SpecError
from hybridpar.planner import make_plan
from hybridpar.planning.bottleneck import bottleneck
from hybridpar.planning.calibration import server_seconds
from hybridpar.planning.counts import server_plans, table_plans, trainer_plan
from hybridpar.planning.dry_run import DryRun, IdsAlone, dry_run
from hybridpar.planning.report import PlanReport
from hybridpar.server.hosted import HostedModule
from hybridpar.server.memory import available_bytes
from hybridpar.specs import RemoteEmbeddingSpec
from hybridpar.trainer.model import HybridModel
from hybridpar.trainer.settings import (
    Consistency,
    SparseSettings,
    check_consistency,
    check_wire_dtype,
    with_optimizers,
)


def plan(
    model: HybridModel[Any] | RemoteEmbeddingSpec | Sequence[RemoteEmbeddingSpec],
    *,
    trainers: int = 1,
    servers: int = 1,
    optimizer: SparseSettings = None,
    batches: Iterable[Any] | Callable[[int], Iterable[Any]] | None = None,
    steps: int = 8,
    consistency: Consistency = "sync",
    staleness: int | None = None,
    wire_dtype: torch.dtype = torch.float32,
    gbit: float = 10.0,
    memory_bytes: int | None = None,
) -> PlanReport:
    """What a model would cost on a cluster, without one: memory, traffic, and what is slowest.

    Places the tables by the planner that :func:`launch` uses. With a sample of batches, every
    trainer's own code takes a few steps against servers that only count, so the bytes are those
    that sockets would carry between machines. (On one machine trainers read the tables in shared
    memory, and next to nothing crosses.) Nothing of the tables' size is allocated.

    Args:
        model: the model, which is left as it is; or only its specs.
        trainers: how many trainers there would be.
        servers: how many servers, each on a machine of its own.
        optimizer: as ``sparse_optimizer`` of :class:`TrainerLoop`: its state takes memory.
        batches: a sample: any iterable of batches, from which every trainer takes some; or a
            function from a trainer's rank to its batches. Without the model a batch is what
            ``sparse_inputs`` would return.
        steps: at most so many batches a trainer.
        consistency: as for :class:`TrainerLoop`.
        staleness: as for :class:`TrainerLoop`.
        wire_dtype: as for :class:`TrainerLoop`.
        gbit: speed of each machine's link in Gbit/s, each way.
        memory_bytes: memory that a server may take; None takes what is left on this machine.

    Raises:
        SpecError: if a setting is wrong, or a table has no optimizer.
        InputError: if the sample is empty, or an id is out of range.

    Example:
        >>> import hybridpar
        >>> item = hybridpar.RemoteEmbeddingSpec("item", num_embeddings=1000, embedding_dim=16)
        >>> report = hybridpar.plan(item, servers=2, optimizer=hybridpar.optim.Adagrad(lr=0.1))
        >>> [server.num_bytes for server in report.servers]
        [64000, 64000]
    """
    _check(trainers=trainers, servers=servers, steps=steps)
    if not (isinstance(gbit, (int, float)) and gbit > 0):
        raise SpecError(f"gbit is {gbit!r}. Give the speed of a link, a number above 0.")
    if memory_bytes is not None:
        _check(memory_bytes=memory_bytes)
    check_consistency(consistency, staleness)
    check_wire_dtype(wire_dtype)
    known = isinstance(model, HybridModel)
    whole = model if isinstance(model, HybridModel) else IdsAlone(*_specs(model))
    specs = with_optimizers(whole.specs, optimizer)
    placed = make_plan(specs, servers)
    modules = {spec.name: HostedModule(spec, "") for spec in specs if spec.module is not None}
    run = DryRun()
    if batches is not None:
        if not callable(batches):
            batches = list(itertools.islice(batches, steps))
        connect = {"sparse_optimizer": optimizer, "consistency": consistency,
                   "staleness": staleness, "wire_dtype": wire_dtype}  # fmt: skip
        with _one_thread():
            run = dry_run(
                whole, batches, trainers=trainers, plan=placed, modules=modules, steps=steps,
                connect=connect,
            )  # fmt: skip
            run.server_s = server_seconds(placed, run.asked_in(0))
    served = server_plans(placed, run, modules, gbit)
    trainer = trainer_plan(whole if known else None, run, trainers, gbit)
    memory = available_bytes() if memory_bytes is None else memory_bytes
    what, why = bottleneck(served, trainer, memory)
    loads = [server.ids_a_step if run.steps else server.num_bytes for server in served]
    mean = sum(load or 0 for load in loads) / len(loads)
    return PlanReport(
        trainers=trainers,
        servers=served,
        tables=table_plans(specs, placed, run, modules),
        trainer=trainer,
        steps=run.steps,
        consistency=consistency if staleness is None else f"{consistency} by {staleness}",
        wire_dtype=str(wire_dtype).removeprefix("torch."),
        gbit=gbit,
        memory_bytes=memory,
        skew=max(load or 0 for load in loads) / mean if mean else 1.0,
        bottleneck=what,
        why=why,
    )


def _check(**numbers: object) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SpecError(f"{name} is {value!r}. Give a whole number of at least 1.")


def _specs(
    model: RemoteEmbeddingSpec | Sequence[RemoteEmbeddingSpec],
) -> Sequence[RemoteEmbeddingSpec]:
    if isinstance(model, RemoteEmbeddingSpec):
        return [model]
    if not isinstance(model, Sequence):
        raise SpecError(f"plan got {model!r}. Give a HybridModel, or a list of its specs.")
    return model


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within it torch has one thread, as a process has on a machine that is shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
