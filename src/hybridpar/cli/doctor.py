"""``hybridpar doctor``: whether jobs can run here, and what the processes of one do."""

from __future__ import annotations

import argparse

from hybridpar.checkup import network, system
from hybridpar.checkup.world import world
from hybridpar.cli.arguments import Commands, positive
from hybridpar.launch import doctor


def add_to(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine, or tell what the processes of a running job do",
        description="Without a job: check whether jobs can run on this machine, how to mend it if "
        "not, and list the jobs that run. With a job: tell what every process of it does just now: "
        "which step it is in, whom it waits for, and the Python stack of each of its threads. Ends "
        "with status 1 if a check fails.",
        epilog="example: hybridpar doctor 4242",
    )
    parser.set_defaults(command=_doctor)
    parser.add_argument(
        "job", type=positive, nargs="?", metavar="JOB",
        help="process id of the script that called launch",
    )  # fmt: skip
    parser.add_argument("--jobs", action="store_true", help="list the jobs that run, and no more")
    parser.add_argument(
        "--master", metavar="HOST",
        help="name or address of another host, to see which interface leads to it",
    )  # fmt: skip


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.job is not None:
        print(doctor.ask(arguments.job))
        return 0
    failed = False if arguments.jobs else _check(arguments.master)
    running = ", ".join(map(str, doctor.jobs()))
    print(f"jobs on this machine: {running}" if running else "no job runs on this machine")
    return int(failed)


def _check(master: str | None) -> bool:
    """Whether any check fails; each is told as soon as it is done."""
    failed = False
    for check in (
        system.versions, lambda: network.chosen_interface(master), network.host_name, network.ports,
        system.shm, system.shared_memory, system.open_files, system.processes, system.locked_memory,
        system.memory, system.cores, world,
    ):  # fmt: skip
        finding = check()
        print(finding.lines(), flush=True)
        failed |= finding.state == "fail"
    return failed
