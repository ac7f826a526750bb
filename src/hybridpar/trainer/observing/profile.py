"""Where a step's time goes: `Profiler` takes it, `StepProfile` shows it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hybridpar.trainer.observing.stopwatch import (
    BACKWARD,
    BATCHES,
    DENSE,
    FORWARD,
    PUSH,
    ROUTE,
    ROWS,
    SERVERS,
)
from hybridpar.trainer.tables import RemoteTables

_PHASES = {
    BATCHES: "the data iterator",
    ROUTE: "sparse_inputs, and what goes where",
    ROWS: "read in shared memory, cut up and put together",
    FORWARD: "",
    BACKWARD: "all-reduce and its wait for other trainers included",
    PUSH: "while the all-reduce runs; the dense ones too if a server averages them",
    DENSE: "",
    SERVERS: "their update, their queue, and the way there and back",
}
_SERVER_PHASES = {
    "update": "the optimizer's kernels",
    "lookup": "rows for trainers that do not read them themselves",
    "queue": "a trainer's gradients wait for the last trainer's",
}


class Profiler:
    """Takes the time of a trainer's steps from when it is made.

    Args:
        tables: the model's tables, which take the time of what they do.
    """

    def __init__(self, tables: RemoteTables) -> None:
        self._tables = tables
        self._watched: set[int] = set()
        self._all_reduce = 0.0
        self._servers = tables.server_timings()
        self._started = time.perf_counter()
        tables.stopwatch.start()

    def note_all_reduce(self, module: nn.Module) -> None:
        """Add the time of a step's all-reduces, from DDP's own log.

        DDP writes it down from the step after the first that this sees.
        """
        sample: Any = getattr(module, "_set_ddp_runtime_logging_sample_rate", None)
        if sample is None:  # one trainer alone, or nothing to reduce
            return
        if id(module) not in self._watched:
            self._watched.add(id(module))
            sample(1)
            return
        log: Any = module
        self._all_reduce += log._get_ddp_logging_data().get("backward_comm_time", 0) / 1e9

    def report(self, steps: int) -> StepProfile:
        """What has been taken, over so many steps."""
        seconds = time.perf_counter() - self._started
        after = self._tables.server_timings()
        return StepProfile(
            steps=steps,
            seconds=seconds,
            trainer=self._tables.stopwatch.stop(),
            all_reduce=self._all_reduce,
            servers={
                server: {
                    name: value - self._servers[server].get(name, 0.0)
                    for name, value in phases.items()
                }
                for server, phases in after.items()
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """Where the time of this trainer's steps went; ``print`` it.

    Attributes:
        steps: over so many.
        seconds: in all.
        trainer: seconds by phase, one after another; they add up to almost all.
        all_reduce: seconds in which DDP's all-reduce ran, part of the backward phase.
        servers: for each server's name, seconds by phase: its optimizer's updates, its lookups
            (all trainers' together), and its queue (the first trainer's gradients waiting for the
            last's).
    """

    steps: int
    seconds: float
    trainer: Mapping[str, float]
    all_reduce: float
    servers: Mapping[str, Mapping[str, float]]

    def __str__(self) -> str:
        """A table of milliseconds a step."""
        lines = [f"{self._ms(self.seconds)} ms a step, mean of {self.steps}", "on this trainer:"]
        lines += [
            self._line(name, self.trainer.get(name, 0.0), why) for name, why in _PHASES.items()
        ]
        lines.append(self._line("else", self.seconds - sum(self.trainer.values()), ""))
        lines.append("at the same time:")
        lines.append(
            self._line(
                "all-reduce",
                self.all_reduce,
                "of the dense gradients, by DDP",
            )
        )
        for server, phases in self.servers.items():
            for name, why in _SERVER_PHASES.items():
                lines.append(self._line(f"{server} {name}", phases.get(name, 0.0), why))
        return "\n".join(lines)

    def _line(self, name: str, seconds: float, why: str) -> str:
        share = seconds / self.seconds if self.seconds else 0.0
        return f"  {name:<22}{self._ms(seconds):>9}{share:>6.0%}  {why}".rstrip()

    def _ms(self, seconds: float) -> str:
        return f"{1000 * seconds / max(1, self.steps):.2f}"
