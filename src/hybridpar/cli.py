"""The ``hybridpar`` command."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence

from hybridpar import __version__, demo
from hybridpar.errors import HybridParError
from hybridpar.launch import doctor
from hybridpar.launch.launcher import RoleLauncher
from hybridpar.launch.roles import Roles
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
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


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
