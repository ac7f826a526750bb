"""``hybridpar plan``: what a model would cost on a cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, get_args

import torch

from hybridpar.cli.arguments import Commands, positive, positive_number
from hybridpar.planning.planned import plan
from hybridpar.planning.sources import (
    optimizer_of,
    read_batches,
    read_model,
    uniform_batches,
)
from hybridpar.specs import RemoteEmbeddingSpec
from hybridpar.trainer.model import HybridModel
from hybridpar.trainer.settings import Consistency

_GIB = 1 << 30
_DEFAULT_OPTIMIZER = "SGD"


def add_to(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "plan",
        help="tell what a model would cost on a cluster, before it runs",
        description="Tell where each table of a model would be and why, the bytes that each server "
        "would hold and that would cross each link in a step, and what would be slowest, on a "
        "cluster that need not exist.",
        epilog="example: hybridpar plan train.py --batches my_batches --trainers 8 --servers 4 "
        "--optimizer Adagrad",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "specs", metavar="SPECS",
        help="FILE.py:NAME, where NAME is a HybridModel, its class, a list of specs, or a function "
        "that returns one of these; FILE.py alone takes what it calls specs or model, or its only "
        "HybridModel; or FILE.json",
    )  # fmt: skip
    parser.add_argument("--trainers", type=positive, default=1, metavar="N", help="how many")
    parser.add_argument("--servers", type=positive, default=1, metavar="N", help="how many")
    parser.add_argument(
        "--batches", metavar="SAMPLE",
        help="sample of batches: a NAME in the same file, FILE.py:NAME, FILE.pt or FILE.json",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size", type=positive, metavar="N",
        help="without a sample: make up batches of so many samples, with each table's "
        "pooling_factor of ids, drawn uniformly",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=positive, default=8, metavar="N", help="batches a trainer, at most"
    )
    parser.add_argument(
        "--optimizer", metavar="NAME",
        help="of every table without one of its own: a name of hybridpar.optim, such as Adagrad or "
        "'SGD(momentum=0.9)' (default: the JSON file's, else SGD)",
    )  # fmt: skip
    parser.add_argument("--consistency", choices=get_args(Consistency), default="sync", help="how")
    parser.add_argument(
        "--staleness", type=int, metavar="N", help="for --consistency bounded: by how many steps"
    )
    parser.add_argument(
        "--wire-dtype", choices=["float32", "bfloat16", "float16"], default="float32",
        help="what rows and gradients are sent as",
    )  # fmt: skip
    parser.add_argument(
        "--gbit", type=positive_number, default=10.0, metavar="G",
        help="speed of each machine's link, in Gbit/s each way",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=positive_number, metavar="GIB",
        help="memory that a server may take (default: what is left on this machine)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    model, named = read_model(arguments.specs)
    batches: Any = None
    if arguments.batches is not None:
        batches = read_batches(arguments.batches, arguments.specs)
        if arguments.batches.endswith((".json", ".pt")) and isinstance(model, HybridModel):
            model = model.specs  # such a file has ids, not the model's batches
    elif arguments.batch_size is not None:
        model = model.specs if isinstance(model, HybridModel) else model
        batches = uniform_batches(model, arguments.batch_size)
    given = arguments.optimizer
    optimizer = optimizer_of(given) if given else named
    if optimizer is None:
        optimizer = optimizer_of(_DEFAULT_OPTIMIZER)
        _say_what_is_assumed(model.specs if isinstance(model, HybridModel) else model)
    report = plan(
        model,
        trainers=arguments.trainers,
        servers=arguments.servers,
        optimizer=optimizer,
        batches=batches,
        steps=arguments.steps,
        consistency=arguments.consistency,
        staleness=arguments.staleness,
        wire_dtype=getattr(torch, arguments.wire_dtype),
        gbit=arguments.gbit,
        memory_bytes=None if arguments.memory is None else int(arguments.memory * _GIB),
    )
    print(report.to_json() if arguments.json else report)
    return 0


def _say_what_is_assumed(specs: Sequence[RemoteEmbeddingSpec]) -> None:
    tables = [spec.name for spec in specs if spec.module is None and spec.optimizer is None]
    if tables:
        print(
            f"hybridpar: no optimizer is named for {', '.join(tables)}: {_DEFAULT_OPTIMIZER} is "
            "assumed, which keeps no state. Name it with --optimizer.",
            file=sys.stderr,
        )
