"""A small world that trains for two seconds: the check that all the others are for."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from hybridpar import optim
from hybridpar.checkup.finding import Finding
from hybridpar.demo import Bags, Demo, random_batches
from hybridpar.errors import HybridParError, WorkerError
from hybridpar.launch.launcher import RoleLauncher
from hybridpar.launch.roles import Roles
from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.loop import TrainerLoop

TRAINING_S = 2.0
_LIMIT_S = 60.0
_ROWS, _COLUMNS = 1000, 16


def world(training_s: float = TRAINING_S) -> Finding:
    """Start two trainers and a server here, and train."""
    started = time.monotonic()
    launcher = RoleLauncher(Roles(trainers=2, servers=1), device="cpu", timeout_s=_LIMIT_S)
    what = f"a world of {launcher.roles.trainers} trainers and {launcher.roles.servers} servers"
    try:
        results = launcher.run(train, (training_s,))
    except (HybridParError, OSError) as error:
        where = error.remote_traceback.rstrip() if isinstance(error, WorkerError) else ""
        return Finding(
            "fail", f"{what} does not train: {error}",
            "Mend what failed above first." if where == "" else "Its traceback says where.",
        )  # fmt: skip
    steps = sum(steps for steps, _ in results)
    what += (
        f" trains: {steps / len(results) / training_s:.0f} steps/s, "
        f"{time.monotonic() - started:.1f} s in all, start and end included"
    )
    if not all(shared for _, shared in results):
        return Finding(
            "warn", f"{what}; but trainers cannot read the server's memory",
            "Everything crosses by socket, which is slower. A process must be allowed to open "
            "/proc/PID/fd of another of the same user: look for hidepid on /proc, a seccomp "
            "profile, or a security module (AppArmor, SELinux, Yama).",
        )  # fmt: skip
    return Finding("ok", f"{what}; trainers read the server's tables in shared memory")


def train(ctx: TrainerContext, training_s: float) -> tuple[int, bool]:
    """The train function: how many steps there were, and whether it read the tables itself."""
    loop = TrainerLoop(
        Demo(_ROWS, _COLUMNS),
        ctx,
        loss=lambda output, batch: F.cross_entropy(output, batch.target),
        dense_optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        sparse_optimizer=optim.SGD(lr=0.05),
    )
    shared = bool(loop.model._connected.reads_here)
    return loop.fit(_batches(training_s)).steps, shared


def _batches(training_s: float) -> Iterator[Bags]:
    limit = time.monotonic() + training_s
    for _ in itertools.count():
        for batch in random_batches(_ROWS, torch.device("cpu")):
            if time.monotonic() > limit:
                return
            yield batch
