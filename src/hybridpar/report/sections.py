"""The sections of the page below the curves; each is empty if nothing is known of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from hybridpar.report.charts import columns, short, stacked_bar, swatch
from hybridpar.report.collected import Collected
from hybridpar.report.planned import planned_traffic
from hybridpar.wording import size

_NUMERIC = "n"


def time(run: Collected) -> Iterator[str]:
    """Where a step's time goes: from the profile if there is one, else the share of waiting."""
    if run.profile is not None and run.profile["steps"]:
        yield from _profile(run.profile)
        return
    steps, seconds = sum(point.steps for point in run.points), run.step_seconds
    if not steps or not seconds:
        return
    parts = {"waiting for servers": run.waiting, "all else": max(0.0, seconds - run.waiting)}
    yield (
        "<h2>Where the time of a step goes</h2>"
        f'<div class="card">{stacked_bar(parts, "Share of a step")}'
        f"{_phases(parts, seconds, steps)}"
        '<p class="soft">On trainer 0. <code>fit(profile=True)</code> tells the phases apart.</p>'
        "</div>"
    )


def _profile(profile: Mapping[str, Any]) -> Iterator[str]:
    steps, seconds = profile["steps"], profile["seconds"]
    phases: dict[str, float] = dict(profile["trainer"])
    phases["else"] = max(0.0, seconds - sum(phases.values()))
    cards = [
        f'<figure class="card"><figcaption>Trainer 0, one phase after another</figcaption>'
        f"{stacked_bar(phases, 'Phases of a step on trainer 0')}{_phases(phases, seconds, steps)}"
        "</figure>"
    ]
    others = {"all-reduce": profile["all_reduce"]}
    for server, parts in profile["servers"].items():
        others |= {f"{server} {name}": value for name, value in parts.items()}
    rows = [
        [escape(name), _ms(value, steps), _share(value, seconds)] for name, value in others.items()
    ]
    cards.append(
        '<figure class="card"><figcaption>At the same time</figcaption>'
        + _table(["", "ms a step", "of a step"], rows)
        + '<p class="soft">The queue is how long the first trainer waits for '
        "the last one at the server. Its lookups are those of trainers that do not read its memory "
        "themselves.</p></figure>"
    )
    yield f'<h2>Where the time of a step goes</h2><div class="grid3">{"".join(cards)}</div>'


def _phases(parts: Mapping[str, float], seconds: float, steps: int) -> str:
    rows = [
        [swatch(number) + escape(name), _ms(value, steps), _share(value, seconds)]
        for number, (name, value) in enumerate(parts.items())
    ]
    return _table(["", "ms a step", "of a step"], rows)


def traffic(run: Collected) -> Iterator[str]:
    """What trainer 0 and each server exchanged in a step; the plan's figures beside it."""
    if not run.servers or not run.steps:
        return
    steps = run.steps
    samples = run.samples / steps
    held = {server["name"]: server for server in run.start["servers"]}
    planned = {} if run.plan is None else planned_traffic(run.plan, run.start)
    most_rows = max((c["rows"] for c in run.servers.values()), default=0) or 1
    moved = {s: c["id_bytes"] + c["row_bytes"] + c["gradient_bytes"]
             for s, c in run.servers.items()}  # fmt: skip
    most_bytes = max(moved.values(), default=0) or 1
    rows = []
    for name, counts in run.servers.items():
        on = held.get(name, {})
        expected = planned.get(name)
        rows_planned = on.get("ids_a_sample", 0.0) * samples if expected is None else expected.rows
        rows.append(
            [
                f"<b>{escape(name)}</b>",
                size(on.get("num_bytes", 0)),
                _metered(short(counts["rows"] / steps), counts["rows"] / most_rows, 0),
                short(rows_planned),
                _metered(size(moved[name] / steps), moved[name] / most_bytes, 2),
                *([size(expected.num_bytes)] if expected else [""] if planned else []),
                size(counts["id_bytes"] / steps),
                size(counts["row_bytes"] / steps),
                size(counts["gradient_bytes"] / steps),
                size((counts["sent_bytes"] + counts["received_bytes"]) / steps),
                f"{1000 * counts['waited_s'] / steps:.3g}",
            ]
        )
    head = ["server", "holds", "rows a step", "planned", "bytes a step",
            *(["planned"] if planned else []),
            "ids", "rows", "gradients", "by socket", "ms waited"]  # fmt: skip
    foretold = (
        "Planned is this trainer's share of what <code>hybridpar plan</code> told, bytes with "
        "what frames a message."
        if planned
        else "Planned are the rows that the tables' <code>pooling_factor</code> tells of, 1 a "
        "sample where it is not given; a plan with a sample tells bytes, too."
    )
    yield (
        "<h2>Rows touched and bytes moved, by server</h2>"
        '<div class="card"><div class="wide" tabindex="0">'
        + _table(head, rows)
        + f'</div><p class="soft">By trainer 0 in a step, mean of {steps:,}; {samples:,.4g} '
        f"samples a step. {foretold} What is not by socket is in memory that both see.</p></div>"
    )


def staleness(run: Collected) -> Iterator[str]:
    """A histogram for each table."""
    tables = (run.last or {}).get("staleness") or {}
    charts = [
        columns(f"Table {name}", {int(behind): n for behind, n in counts.items()})
        for name, counts in tables.items()
        if counts
    ]
    if not charts:
        return
    yield "<h2>Staleness</h2>"
    if all(set(counts) <= {"0"} for counts in tables.values()):
        lookups = max(sum(counts.values()) for counts in tables.values())
        yield (
            f"<p>No row was stale in {lookups:,} lookups of trainer 0: each had seen every update "
            "of every earlier step.</p>"
        )
        return
    yield (
        '<p class="soft">By how many steps of the slowest trainer the rows of a batch were '
        f'behind; lookups of trainer 0.</p><div class="grid3">{"".join(charts)}</div>'
    )


def plan(run: Collected) -> Iterator[str]:
    """Which server keeps what."""
    tables: Sequence[Mapping[str, Any]] = run.start["tables"]
    modules = [(name, s["name"]) for s in run.start["servers"] for name in s["modules"]]
    if not tables and not modules:
        return
    most = max((table["num_bytes"] for table in tables), default=0) or 1
    rows = [
        [
            f"<b>{escape(table['name'])}</b>",
            f"{table['num_embeddings']:,} by {table['embedding_dim']}",
            escape(table["dtype"]),
            _metered(size(table["num_bytes"]), table["num_bytes"] / most, 0),
            escape(table["sharding"].replace("_", "-")),
            escape(_shards(table)),
            f"<code>{escape(table['optimizer'])}</code>",
        ]
        for table in tables
    ]
    rows += [[f"<b>{escape(name)}</b>", "module", "", "", "", server, ""]
             for name, server in modules]  # fmt: skip
    head = ["table", "rows by columns", "dtype", "bytes", "sharding", "servers", "optimizer"]
    yield (
        '<h2>Plan</h2><div class="card"><div class="wide" tabindex="0">'
        + _table(head, rows)
        + '</div><p class="soft">Bytes are those of weights and optimizer state.</p></div>'
    )


def checkpoints(run: Collected) -> Iterator[str]:
    """Those that became current; the newest ten."""
    if not run.checkpoints:
        return
    rows = [
        [f"{each['step']:,}", size(each["num_bytes"]), f"{each['seconds']:.2f}",
         f"<code>{escape(each['path'])}</code>"]
        for each in run.checkpoints[-10:]
    ]  # fmt: skip
    yield (
        '<h2>Checkpoints</h2><div class="card"><div class="wide" tabindex="0">'
        + _table(["step", "bytes", "seconds", "folder"], rows)
        + "</div></div>"
    )


def settings(run: Collected) -> Iterator[str]:
    """The loop's settings, and versions."""
    cards = [
        f'<figure class="card"><figcaption>{title}</figcaption>'
        + _table([], [[escape(k), f"<code>{escape(str(v))}</code>"] for k, v in values.items()])
        + "</figure>"
        for title, values in (
            ("Settings", run.start["settings"]),
            ("Versions", run.start["versions"]),
        )
        if values
    ]
    if cards:
        yield f'<h2>Settings and versions</h2><div class="grid3">{"".join(cards)}</div>'


def _shards(table: Mapping[str, Any]) -> str:
    shards = table["shards"]
    if len(shards) > 4:
        return f"{shards[0]['server']} to {shards[-1]['server']}"
    if table["sharding"] == "column_wise":
        return ", ".join(
            f"{s['server']} (columns {s['first_column']} to "
            f"{s['first_column'] + s['num_columns'] - 1})"
            for s in shards
        )
    if len(shards) == 1:
        return str(shards[0]["server"])
    return ", ".join(f"{s['server']} ({short(s['num_rows'])} rows)" for s in shards)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are HTML already; those that begin with a digit stand right."""
    numeric = [
        all(row[n][:1].isdigit() for row in rows) for n in range(len(rows[0]) if rows else 0)
    ]

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if numeric[n] else ''}>{cell}</{tag}>" for n, cell in enumerate(row)
        )

    top = f"<thead><tr>{cells('th', head)}</tr></thead>" if head and rows else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table>{top}<tbody>{body}</tbody></table>"


def _metered(text: str, share: float, colour: int) -> str:
    return f'{text}<i class="meter b{colour}" style="width:{100 * share:.1f}%"></i>'


def _ms(seconds: float, steps: int) -> str:
    return f"{1000 * seconds / steps:.3f}"


def _share(seconds: float, all_seconds: float) -> str:
    return f"{seconds / all_seconds:.1%}" if all_seconds else ""
