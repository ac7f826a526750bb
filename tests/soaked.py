"""The train function of the soak. Imports no test tool."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import hybridpar as hp
from faulty import make_loop
from worlds import Batch, make_batch


class Usage(NamedTuple):
    """Memory and open files of the job's processes, after a tenth of the steps and after all."""

    steps: int
    megabytes: dict[str, tuple[float, float]]
    files: dict[str, tuple[int, int]]


def train(ctx: hp.TrainerContext, consistency: str, steps: int = 20_000) -> Usage:
    """Steps with small random delays, so that now one process is late and now another."""
    loop = make_loop(ctx, consistency=consistency)
    kept = [make_batch(1000 * number + ctx.rank, bags=True) for number in range(50)]
    chance = random.Random(ctx.rank)

    def batches(count: int) -> Iterator[Batch]:
        for number in range(count):
            if chance.random() < 0.05:
                time.sleep(chance.random() * 0.004)
            yield kept[number % len(kept)]

    loop.fit(batches(steps // 10))
    warm = look()
    done = loop.fit(batches(steps - steps // 10)).steps + steps // 10
    end = look()
    return Usage(
        done,
        {name: (memory, end[name][0]) for name, (memory, _) in warm.items()},
        {name: (files, end[name][1]) for name, (_, files) in warm.items()},
    )


def look() -> dict[str, tuple[float, int]]:
    """Megabytes and open files of all processes forked from this one's parent, itself included."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _parent(entry) == os.getppid():
            memory = [
                int(line.split()[1]) / 1024
                for line in (entry / "status").read_text().splitlines()
                if line.startswith(("RssAnon:", "RssShmem:"))
            ]
            found[entry.name] = sum(memory), len(list((entry / "fd").iterdir()))
    return found


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
    except OSError:
        return 0
