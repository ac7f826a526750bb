"""``hybridpar report``: an HTML page on a run, from its log."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hybridpar.cli.arguments import Commands
from hybridpar.report.collected import Collected
from hybridpar.report.page import page
from hybridpar.report.planned import planned_traffic, read_plan


def add_to(commands: Commands) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "report",
        help="make an HTML page of a run's log",
        description="Make one self-contained HTML page of the log that callbacks.JSONL wrote, also "
        "of a run that failed, was killed, or still runs.",
        epilog="example: hybridpar report run.jsonl -o run.html",
    )
    parser.add_argument("log", type=Path, metavar="LOG", help="the log, such as run.jsonl")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PAGE",
        help="the page; by default beside the log, with the ending .html",
    )  # fmt: skip
    parser.add_argument("--title", metavar="TEXT", help="the page's title; the log's name if not")
    parser.add_argument(
        "--plan", type=Path, metavar="FILE",
        help="what hybridpar plan --json printed, to be shown beside what was measured",
    )  # fmt: skip
    parser.set_defaults(command=_report)


def _report(arguments: argparse.Namespace) -> int:
    output: Path = arguments.output or arguments.log.with_suffix(".html")
    run = Collected.read(arguments.log)
    if arguments.plan is not None:
        run.plan = read_plan(arguments.plan)
        planned_traffic(run.plan, run.start)  # refuses one for another cluster
    html = page(run, arguments.title or arguments.log.stem)
    try:
        output.write_text(html, encoding="utf-8")
    except OSError as error:
        print(f"hybridpar: cannot write {output}: {error}", file=sys.stderr)
        return 1
    print(output)
    return 0
