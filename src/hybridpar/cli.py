"""The ``hybridpar`` command."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from hybridpar import __version__, demo
from hybridpar.checkpoint import files, folders
from hybridpar.checkpoint.manifest import Manifest
from hybridpar.errors import HybridParError
from hybridpar.launch import doctor
from hybridpar.launch.launcher import RoleLauncher
from hybridpar.launch.roles import Roles
from hybridpar.report.collected import Collected
from hybridpar.report.page import page
from hybridpar.trainer.progress import FitResult


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; None takes the process's own.

    Returns:
        The exit status: 0, or 1 if the job failed.
    """
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.command(arguments))
    except HybridParError as error:
        print(f"hybridpar: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hybridpar: interrupted; every process of the job was ended", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybridpar", description=__doc__)
    parser.add_argument("--version", action="version", version=f"hybridpar {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run_demo = commands.add_parser(
        "demo",
        help="train a small hybrid model on random data",
        description="Train the model of PyTorch's DDP-with-RPC tutorial on random data: an "
        "EmbeddingBag on the servers, a linear layer under DDP on the trainers.",
        epilog="example: hybridpar demo --trainers 3 --servers 2 --epochs 20",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    run_demo.set_defaults(command=_demo)
    for flag, default, what in (
        ("--trainers", 2, "number of trainers"),
        ("--servers", 1, "number of parameter servers"),
        ("--epochs", 100, "passes of ten batches a trainer"),
        ("--num-embeddings", 100, "rows of the table"),
        ("--embedding-dim", 16, "columns of the table"),
    ):
        run_demo.add_argument(flag, type=_positive, default=default, metavar="N", help=what)
    run_demo.add_argument("--seed", type=int, default=0, metavar="N", help="seed of data and model")
    ask_doctor = commands.add_parser(
        "doctor",
        help="tell what the processes of a running job do",
        description="Tell what every process of a job on this machine does just now: which step it "
        "is in, whom it waits for, and the Python stack of each of its threads. Without a job, "
        "list the jobs that run.",
        epilog="example: hybridpar doctor 4242",
    )
    ask_doctor.set_defaults(command=_doctor)
    ask_doctor.add_argument(
        "job", type=_positive, nargs="?", metavar="JOB",
        help="process id of the script that called launch",
    )  # fmt: skip
    checkpoint = commands.add_parser(
        "checkpoint",
        help="show what a checkpoint holds, or check it",
        description="Show what a checkpoint holds, or compare its files with their checksums. "
        "Given a directory with several, the newest is taken.",
        epilog="example: hybridpar checkpoint verify runs/checkpoints",
    )
    checkpoint.add_argument("action", choices=["show", "verify"])
    checkpoint.add_argument("directory", type=Path, metavar="DIR")
    checkpoint.set_defaults(command=_checkpoint)
    report = commands.add_parser(
        "report",
        help="make an HTML page of a run's log",
        description="Make one self-contained HTML page of the log that callbacks.JSONL wrote, also "
        "of a run that failed, was killed, or still runs.",
        epilog="example: hybridpar report run.jsonl -o run.html",
    )
    report.add_argument("log", type=Path, metavar="LOG", help="the log, such as run.jsonl")
    report.add_argument(
        "-o", "--output", type=Path, metavar="PAGE",
        help="the page; by default beside the log, with the ending .html",
    )  # fmt: skip
    report.add_argument("--title", metavar="TEXT", help="the page's title; the log's name if not")
    report.set_defaults(command=_report)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def _checkpoint(arguments: argparse.Namespace) -> int:
    folder = folders.newest(arguments.directory)
    manifest = Manifest.read(folder)
    if arguments.action == "verify":
        for path in folders.chain(folder):
            entries = Manifest.read(path).all_files()
            for entry in entries:
                files.check(path, entry)
            print(f"{path}: all {len(entries)} files are whole")
        return 0
    print(folder)
    if manifest.base:
        print(f"holds the rows that changed since {manifest.base}")
    print(f"step {manifest.step}, epoch {manifest.epoch}, batch {manifest.batches}")
    print(f"written by {manifest.num_trainers} trainers and {manifest.num_servers} servers")
    for name, table in manifest.tables.items():
        width = table.embedding_dim * getattr(torch, table.dtype).itemsize
        width += 4 * sum(table.widths.values())
        print(
            f"table {name}: {table.num_embeddings:,} rows of {table.embedding_dim} {table.dtype}, "
            f"{table.optimizer}, {table.num_embeddings * width:,} bytes"
        )
    for name, entry in manifest.modules.items():
        print(f"module {name}: {entry.num_bytes:,} bytes")
    total = sum(entry.num_bytes for entry in manifest.all_files())
    print(f"{len(manifest.all_files())} files, {total:,} bytes")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    output: Path = arguments.output or arguments.log.with_suffix(".html")
    html = page(Collected.read(arguments.log), arguments.title or arguments.log.stem)
    try:
        output.write_text(html, encoding="utf-8")
    except OSError as error:
        print(f"hybridpar: cannot write {output}: {error}", file=sys.stderr)
        return 1
    print(output)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.job is not None:
        print(doctor.ask(arguments.job))
        return 0
    running = ", ".join(map(str, doctor.jobs()))
    print(f"jobs on this machine: {running}" if running else "no job runs on this machine")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    roles = Roles(trainers=arguments.trainers, servers=arguments.servers)
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("hybridpar").setLevel(logging.INFO)  # names every process as it starts
    started = time.perf_counter()
    results: list[list[FitResult]] = RoleLauncher(roles).run(
        demo.train,
        (arguments.epochs, arguments.num_embeddings, arguments.embedding_dim, arguments.seed),
    )
    steps = sum(epoch.steps for epoch in results[0])
    seconds = sum(epoch.seconds for epoch in results[0])
    first = sum(epochs[0].first_loss for epochs in results) / len(results)
    last = sum(epochs[-1].epoch_losses[0] for epochs in results) / len(results)
    print(f"loss: {first:.4f} at the start, {last:.4f} over the last epoch")
    print(
        f"{steps / seconds:.0f} steps/s ({steps} steps on each of {roles.trainers} trainers); "
        f"{time.perf_counter() - started:.1f} s in all, start and end included"
    )
    return 0
