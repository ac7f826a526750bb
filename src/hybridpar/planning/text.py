"""A `PlanReport` as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridpar.wording import many, size

if TYPE_CHECKING:
    from hybridpar.planning.report import PlanReport

_WIDTH = 100


def written(plan: PlanReport) -> str:
    """The whole report."""
    servers = len(plan.servers)
    parts = [
        f"{many(plan.trainers, 'trainer')}, {many(servers, 'server')}; {plan.consistency}, "
        f"{plan.wire_dtype} on the wire, {plan.gbit:g} Gbit/s a machine",
        "",
        *_tables(plan),
        "",
        *_servers(plan),
        "",
        *_trainer(plan),
        _memory(plan),
        f"skew: the most loaded server has {plan.skew:.2f} times the mean",
        f"bottleneck: {plan.bottleneck or 'not known'}: {plan.why}",
    ]
    return "\n".join(parts)


def _tables(plan: PlanReport) -> list[str]:
    head = ["table", "sharding", "on", "bytes"]
    if plan.steps:
        head += ["ids/step", "ids/bag", "unique", "top 1 %"]
    rows = []
    for table in plan.tables:
        row = [table.name, table.sharding, _ranks(table.servers), size(table.num_bytes)]
        if plan.steps:
            row += [
                _number(table.ids_a_step), _number(table.pooling_factor),
                _percent(table.unique_share), _percent(table.top_share),
            ]  # fmt: skip
        rows.append(row)
    why = [
        line
        for table in plan.tables
        for line in textwrap.wrap(
            f"{table.name}: {table.why}", _WIDTH, initial_indent="  ", subsequent_indent="    "
        )
    ]
    return [*columns(head, rows, left=3), "why:", *why]


def _servers(plan: PlanReport) -> list[str]:
    head = ["server", "bytes", "weights", "state", "modules"]
    if plan.steps:
        head += ["ids/step", "rows/step", "in/step", "out/step", "network", "update"]
    rows = []
    for server in plan.servers:
        row = [
            f"ps{server.rank}", f"{server.num_bytes:,}", size(server.weight_bytes),
            size(server.state_bytes), size(server.module_bytes),
        ]  # fmt: skip
        if plan.steps:
            row += [
                _number(server.ids_a_step), _number(server.rows_a_step),
                _size(server.received_a_step), _size(server.sent_a_step),
                _seconds(server.network_s), _seconds(server.update_s),
            ]  # fmt: skip
        rows.append(row)
    return columns(head, rows, left=1)


def _trainer(plan: PlanReport) -> list[str]:
    trainer = plan.trainer
    lines = []
    if plan.steps:
        reduced = "the dense gradients among them "
        if trainer.all_reduced_a_step or not trainer.dense_bytes:
            reduced = f"{_size(trainer.all_reduced_a_step)} each way for the all-reduce "
        lines.append(
            f"each trainer: {_size(trainer.sent_a_step)} out and "
            f"{_size(trainer.received_a_step)} in a step, {reduced}"
            f"({_seconds(trainer.network_s)} of its link); {_seconds(trainer.compute_s)} of work"
        )
    if trainer.dense_bytes is None:
        lines.append("the dense half is not known: its compute and all-reduce are left out")
    return lines


def _memory(plan: PlanReport) -> str:
    most = max(server.num_bytes for server in plan.servers)
    all_bytes = sum(server.num_bytes for server in plan.servers)
    line = f"memory: {size(most)} on the fullest server, {size(all_bytes)} on all together"
    if not plan.memory_bytes:  # not known, or none is left
        return line
    return f"{line}; a server may take {size(plan.memory_bytes)} ({most / plan.memory_bytes:.1%})"


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """A table of text; the first ``left`` columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


def _size(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else size(num_bytes)


def _ranks(servers: Sequence[int]) -> str:
    if len(servers) > 3:
        return f"{len(servers)} servers"
    return " ".join(f"ps{rank}" for rank in servers)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
