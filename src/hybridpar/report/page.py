"""`page`: one self-contained HTML page on a run."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from html import escape

from hybridpar.report import sections
from hybridpar.report.charts import Line, line_chart, short
from hybridpar.report.collected import Collected
from hybridpar.report.style import CSS, NUM_COLOURS, SCRIPT
from hybridpar.wording import many


def page(run: Collected, title: str = "") -> str:
    """The page.

    Args:
        run: what is known of the run.
        title: its title; empty for one of the run's own.
    """
    title = title or "hybridpar run"
    parts = [*_head(run, title), *_curves(run), *sections.time(run), *sections.traffic(run),
             *sections.staleness(run), *sections.plan(run), *sections.checkpoints(run),
             *sections.settings(run)]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + f"\n</main><script>{SCRIPT}</script></body></html>\n"
    )


def _head(run: Collected, title: str) -> Iterator[str]:
    start = run.start
    began = datetime.fromtimestamp(run.first_time or 0.0, timezone.utc)
    seconds = max(0.0, run.newest_time - (run.first_time or 0.0))
    facts = [
        f"{_state(run)} after {_duration(seconds)}",
        f"began {began:%Y-%m-%d %H:%M} UTC on {start['host']}",
        f"{many(start['num_trainers'], 'trainer')} on {start['device'].partition(':')[0]}",
        many(start["num_servers"], "server"),
        start["consistency"],
    ]
    if start.get("attempt"):
        facts.append(many(start["attempt"], "restart"))
    yield f'<h1>{escape(title)}</h1><p class="soft">{escape(" · ".join(facts))}</p>'
    if run.last and run.last["record"] == "failure":
        yield f'<div class="bad">{escape(run.last["error"])}</div>'
    yield f'<div class="tiles">{"".join(_tiles(run))}</div>'


def _state(run: Collected) -> str:
    if run.last is None:
        return "not ended (it still runs, or was killed)"
    return "failed" if run.last["record"] == "failure" else "done"


def _tiles(run: Collected) -> Iterator[str]:
    points = run.points
    if points:
        steps = sum(point.steps for point in points)
        yield _tile(f"{points[-1].step:,}", "optimizer steps")
        losses = [point.loss for point in points if point.loss is not None]
        if losses:
            tail = losses[-max(1, len(losses) // 20) :]
            yield _tile(f"{sum(tail) / len(tail):.4g}", "loss, last 5 % of steps")
        if run.samples_per_second:
            yield _tile(short(run.samples_per_second), "samples/s, all trainers")
        seconds = run.step_seconds
        if seconds:
            yield _tile(f"{1000 * seconds / steps:.3g} ms", "a step")
            yield _tile(f"{run.waiting / seconds:.0%}", "of it waiting for servers")
    for name, value in (run.evaluations[-1]["results"] if run.evaluations else {}).items():
        if value is not None:
            yield _tile(f"{value:.4g}", f"{name}, last evaluation")


def _tile(value: str, what: str) -> str:
    return f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>"


def _curves(run: Collected) -> Iterator[str]:
    points = run.points
    losses = [(float(p.step), p.loss) for p in points if p.loss is not None]
    lines = [Line("loss", losses)]
    if len(losses) > 40:
        lines = [Line("smoothed", _smoothed(losses)), Line("a step", losses, pale=True)]
    charts = [line_chart("Loss of trainer 0", lines)]
    charts += [
        line_chart(name, [Line(name, each)]) for name, each in sorted(_evaluated(run).items())
    ]
    rates = [(float(p.step), p.samples / p.seconds) for p in points if p.seconds]
    steps = [(float(p.step), p.steps / p.seconds) for p in points if p.seconds]
    waits = [(float(p.step), p.waiting / p.seconds) for p in points if p.seconds]
    if any(rate for _, rate in rates):
        title = "Samples a second, all trainers"
        charts.append(line_chart(title, [Line("samples/s", _smoothed(rates))], from_zero=True))
    charts.append(line_chart("Steps a second", [Line("steps/s", _smoothed(steps))], from_zero=True))
    title = "Share of time waiting for servers"
    charts.append(line_chart(title, [Line("waiting", _smoothed(waits))], unit="%", from_zero=True))
    for title, group in _measured(run).items():
        smooth = _smoothed if title == "Staleness" else list
        lines = [Line(name, smooth(each)) for name, each in group.items()]
        charts.append(line_chart(title, lines, from_zero=True))
    drawn = [chart for chart in charts if chart]
    if drawn:
        yield f'<h2>Curves</h2><div class="grid3">{"".join(drawn)}</div>'


def _evaluated(run: Collected) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for evaluation in run.evaluations:
        for name, value in evaluation["results"].items():
            if value is not None:
                found.setdefault(name, []).append((float(evaluation["step"]), float(value)))
    return found


def _measured(run: Collected) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """The monitors' metrics, those with one prefix together in a chart."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for point in run.points:
        for name, value in point.metrics.items():
            title, _, rest = name.partition("/")
            group = found.setdefault({"lr": "Learning rate"}.get(title, title.capitalize()), {})
            if (rest or name) in group or len(group) < NUM_COLOURS:
                group.setdefault(rest or name, []).append((float(point.step), value))
    return found


def _smoothed(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means over a window of a fiftieth of the curve, centred; the points stay where they are."""
    reach = len(points) // 100
    if not reach:
        return points
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    found = []
    for index, (x, _) in enumerate(points):
        low, high = max(0, index - reach), min(len(points), index + reach + 1)
        found.append((x, (sums[high] - sums[low]) / (high - low)))
    return found


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
