"""The script that the tests of many hosts give to torchrun: torchrun_job.py WHAT FOLDER."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

import hybridpar as hp
from faulty import make_loop
from watched import chatter  # noqa: F401 - by name, as the others
from worlds import CASES, Batch, make_batch, run_loop


def train_until_told(ctx: hp.TrainerContext, folder: str) -> int:
    """Train until there is a file "stop"; leave a mark once some steps are done."""

    def batches():
        for step in itertools.count():
            if step == 5:
                Path(folder, f"trainer{ctx.rank}.mark").touch()
            if Path(folder, "stop").exists():
                return
            yield make_batch(step, bags=True)

    return make_loop(ctx).fit(batches()).steps


def compute_for_long(ctx: hp.TrainerContext, folder: str) -> str:
    """Longer than the limit of the signs of life: in Python, and in a call of torch."""
    loop = make_loop(ctx)
    loop.fit([make_batch(0, bags=True)])
    end = time.monotonic() + float(os.environ["SECONDS"])
    while time.monotonic() < end:
        sum(range(10_000)) if ctx.rank else torch.rand(300, 300) @ torch.rand(300, 300)
    loop.fit([make_batch(1, bags=True)])
    return "well"


def fail_once(ctx: hp.TrainerContext, folder: str) -> str:
    """Trainer 1 raises in the first attempt."""
    make_loop(ctx).fit([make_batch(step, bags=True) for step in range(3)])
    if ctx.rank == 1 and not Path(folder, "failed").exists():
        Path(folder, "failed").touch()
        raise OSError("the first attempt")
    return f"attempt {ctx.attempt}"


def fail(ctx: hp.TrainerContext, folder: str) -> None:
    def loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        if ctx.rank == 1 and ctx.step == 4:
            raise ZeroDivisionError("the data are bad")
        return output.sum()

    make_loop(ctx, loss).fit(make_batch(step, bags=True) for step in range(1000))


def _listening(pid: str) -> set[str]:
    """Addresses that a process listens at, in the form of /proc/net/tcp."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.add(words[1].split(":")[0])
    return found


def listening(ctx: hp.TrainerContext, folder: str) -> set[str]:
    """Where the processes of this job listen, torchrun aside."""
    make_loop(ctx).fit([make_batch(0, bags=True)])
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and os.access(entry / "fd", os.R_OK):
            command = (entry / "cmdline").read_text()
            if folder in command and "torch.distributed.run" not in command:
                found |= _listening(entry.name)
    return found


def equal_to_one_machine(ctx: hp.TrainerContext, folder: str) -> object:
    return run_loop(ctx, CASES[0], [6, 4], epochs=2)


def main(what: str, folder: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if "FAKE_VERSION" in os.environ:
        hp.__version__ = os.environ["FAKE_VERSION"]
    servers = int(os.environ.get("SERVERS", "1"))
    roles, logs = {"trainer": 2, "ps": servers}, os.environ.get("LOG_DIR")
    launcher = hp.RoleLauncher(roles, share_memory=False, log_dir=logs)
    results = launcher.run(globals()[os.environ.get("WHAT", what)], (folder,))
    torch.save(results, Path(folder, f"rank{os.environ['RANK']}.pt"))
    Path(folder, f"rank{os.environ['RANK']}.done").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
