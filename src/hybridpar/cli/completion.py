"""``hybridpar completion``: the shell's completion of this command line."""

from __future__ import annotations

import argparse

from hybridpar.cli.arguments import Commands
from hybridpar.errors import SpecError


def add_to(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "completion",
        help="print a script that completes this command in a shell",
        description="Print a script for the shell to read at its start, such that it completes "
        "hybridpar's commands, options and files. Needs shtab: pip install "
        "'hybridpar[completion]'.",
        epilog="example: hybridpar completion bash > "
        "~/.local/share/bash-completion/completions/hybridpar",
    )
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    parser.set_defaults(command=_completion)


def _completion(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise SpecError("Completion needs shtab: pip install 'hybridpar[completion]'.") from error
    from hybridpar.cli import parser

    print(shtab.complete(parser(), arguments.shell))
    return 0
