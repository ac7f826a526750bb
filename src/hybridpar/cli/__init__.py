"""The ``hybridpar`` command: each of its commands is a module here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hybridpar import __version__
from hybridpar.cli import checkpoint, completion, demo, doctor, plan, report, run
from hybridpar.errors import HybridParError

COMMANDS = (demo, run, plan, doctor, checkpoint, report, completion)  # each has add_to(commands)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; None takes the process's own.

    Returns:
        The exit status: 0, or 1 if the command failed.
    """
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.command(arguments))
    except HybridParError as error:
        print(f"hybridpar: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hybridpar: interrupted; every process of the job was ended", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    whole = argparse.ArgumentParser(
        prog="hybridpar",
        description="Train recommenders whose embedding tables live on parameter servers.",
        epilog="example: hybridpar demo --trainers 2 --servers 1",
    )
    whole.add_argument("--version", action="version", version=f"hybridpar {__version__}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return whole
