"""``hybridpar demo``: train a small hybrid model on random data."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from hybridpar import demo
from hybridpar.cli.arguments import Commands, positive
from hybridpar.launch.launcher import RoleLauncher
from hybridpar.launch.roles import Roles
from hybridpar.trainer.progress import FitResult


def add_to(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="train a small hybrid model on random data",
        description="Train the model of PyTorch's DDP-with-RPC tutorial on random data: an "
        "EmbeddingBag on the servers, a linear layer under DDP on the trainers.",
        epilog="example: hybridpar demo --trainers 3 --servers 2 --epochs 20",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(command=_demo)
    for flag, default, what in (
        ("--trainers", 2, "number of trainers"),
        ("--servers", 1, "number of parameter servers"),
        ("--epochs", 100, "passes of ten batches a trainer"),
        ("--num-embeddings", 100, "rows of the table"),
        ("--embedding-dim", 16, "columns of the table"),
    ):
        parser.add_argument(flag, type=positive, default=default, metavar="N", help=what)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of data and model")


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
