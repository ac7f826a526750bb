"""``hybridpar run``: a script, with as many trainers and servers as the command line says."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from hybridpar.cli.arguments import Commands, positive
from hybridpar.errors import SpecError
from hybridpar.launch.logs import LOG_DIRECTORY
from hybridpar.launch.roles import SERVERS, TRAINERS


def add_to(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "run",
        help="run a script with given numbers of trainers and servers",
        description="Run a Python script on this machine. Its calls of hybridpar.launch and "
        "RoleLauncher take the numbers of trainers and servers from here, whatever they name "
        "themselves. The script takes this process's place, so that its exit status, Ctrl-C and "
        "process id (for hybridpar doctor) are its own. Options of run go before the script.",
        epilog="example: hybridpar run --trainers 2 --servers 2 train.py --epochs 3",
    )
    parser.add_argument("--trainers", type=positive, metavar="N", help="number of trainers")
    parser.add_argument("--servers", type=positive, metavar="N", help="number of servers")
    parser.add_argument(
        "--log-dir", type=Path, metavar="DIR",
        help="write what each process logs and prints to DIR/trainer0.log and so on, too",
    )  # fmt: skip
    parser.add_argument(
        "-m", "--module", action="store_true",
        help="SCRIPT is the name of a module, as for python -m",
    )  # fmt: skip
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that calls launch")
    parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments"
    )
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.module and not os.path.exists(arguments.script):
        raise SpecError(f"There is no script {arguments.script}. For a module give --module.")
    environment = dict(os.environ)
    for name, number in ((TRAINERS, arguments.trainers), (SERVERS, arguments.servers)):
        if number is not None:
            environment[name] = str(number)
    if arguments.log_dir is not None:
        environment[LOG_DIRECTORY] = str(arguments.log_dir.absolute())
    script = ["-m", arguments.script] if arguments.module else [arguments.script]
    sys.stdout.flush()
    sys.stderr.flush()
    # Not a child: no signal has to be passed on, and none can leave an orphan.
    os.execve(sys.executable, [sys.executable, *script, *arguments.args], environment)
