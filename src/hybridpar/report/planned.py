"""What `hybridpar plan` foretold of a run, as one trainer's share, for the page to show beside."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hybridpar.errors import SpecError


class Planned(NamedTuple):
    """What one trainer and one server were to exchange in a step.

    Attributes:
        rows: rows looked up, each as often as a batch names it.
        num_bytes: ids, rows, gradients and what frames them.
    """

    rows: float
    num_bytes: float


def planned_traffic(plan: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, Planned]:
    """A plan's figures by server; empty if it was made without a sample.

    Args:
        plan: as `PlanReport.to_dict` gives it.
        start: the entry with which a run's log begins.

    Raises:
        SpecError: if it is no plan, or one for other numbers of trainers or servers.
    """
    try:
        trainers, servers = plan["trainers"], plan["servers"]
        figures = {f"ps{server['rank']}": server for server in servers}
        mine, its = (start["num_trainers"], start["num_servers"]), (trainers, len(figures))
        if mine != its:
            raise SpecError(
                f"The plan is for {its[0]} trainers and {its[1]} servers, and the run has "
                f"{mine[0]} and {mine[1]}. Make one with --trainers {mine[0]} --servers {mine[1]}."
            )
        return {
            name: Planned(
                server["ids_a_step"] / trainers,
                (server["received_a_step"] + server["sent_a_step"]) / trainers,
            )
            for name, server in figures.items()
            if server["ids_a_step"] is not None
        }
    except (KeyError, TypeError) as error:
        raise SpecError(
            "The plan is none that hybridpar.plan(...).to_dict() gives, or hybridpar plan --json."
        ) from error


def read_plan(path: Path) -> dict[str, Any]:
    """What ``hybridpar plan --json`` has printed into a file.

    Raises:
        SpecError: if there is no such file, or it has something else.
    """
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"{path} is no plan of hybridpar plan --json: {error}.") from error
    if not isinstance(plan, dict):
        raise SpecError(f"{path} is no plan of hybridpar plan --json.")
    return plan
