"""Charts as inline SVG. Text is in the page's own font and colours, by the classes of `style`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 380, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 18, 12, 26


class Line(NamedTuple):
    """One curve: its name, and its points (x, y) in the order of x; pale behind the others."""

    name: str
    points: Sequence[tuple[float, float]]
    pale: bool = False


def line_chart(
    title: str, lines: Sequence[Line], *, unit: str = "", from_zero: bool = False
) -> str:
    """Curves over optimizer steps.

    Args:
        title: what is drawn.
        lines: the curves, at most as many as `style` has colours; empty ones are left out.
        unit: of the values; ``"%"`` shows shares as percentages.
        from_zero: whether the axis begins at 0.
    """
    lines = sorted((line for line in lines if line.points), key=lambda line: not line.pale)
    if not lines:
        return ""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    low, high = min(ys), max(ys)
    low = min(0.0, low) if from_zero else low
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = (low, low + 1.0) if low == 0 else (low - abs(low) / 10, high + abs(high) / 10)
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    first, last = min(xs), max(xs)
    last = last if last > first else first + 1

    def px(x: float) -> float:
        return _LEFT + (x - first) / (last - first) * (WIDTH - _LEFT - _RIGHT)

    def py(y: float) -> float:
        return HEIGHT - _BOTTOM - (y - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value(tick, unit)}</text>'
        for tick in ticks
        for y in (py(tick),)
    ]
    parts += [
        f'<text x="{px(tick):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{short(tick)}</text>'
        for tick in _ticks(first, last)
        if float(tick).is_integer()
    ]
    colours = iter(range(len(lines)))
    for line in lines:
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in line.points)
        colour = "pale" if line.pale else f"s{next(colours)}"
        parts.append(f'<polyline class="{colour}" points="{path}"/>')
        if len(line.points) == 1:
            x, y = line.points[0]
            parts.append(f'<circle class="{colour} dot" cx="{px(x):.1f}" cy="{py(y):.1f}" r="3"/>')
    data = [
        {"name": line.name, "unit": unit,
         "steps": [round(x) for x, _ in line.points],
         "values": [float(f"{y:.5g}") for _, y in line.points]}
        for line in lines
    ]  # fmt: skip
    names = [line.name for line in lines if not line.pale]
    label = f"{title}, over optimizer steps"
    return (
        f'<figure class="card"><figcaption>{escape(title)}{_key(names)}</figcaption>'
        f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(label)}" data-lines="{escape(json.dumps(data))}">'
        f"{''.join(parts)}</svg></figure>"
    )


def stacked_bar(parts: Mapping[str, float], label: str) -> str:
    """One horizontal bar of parts, each with its colour and a gap between them."""
    total = sum(parts.values()) or 1.0
    cells = "".join(
        f'<i class="b{number}" style="flex:{amount / total:.6f}" title="{escape(name)}: '
        f'{amount / total:.1%}"></i>'
        for number, (name, amount) in enumerate(parts.items())
        if amount / total >= 0.001
    )
    return f'<div class="stack" role="img" aria-label="{escape(label)}">{cells}</div>'


def columns(title: str, counts: Mapping[int, int]) -> str:
    """A histogram: a column for each whole number from 0 on."""
    most, total = max(counts.values()), sum(counts.values())
    cells = []
    for number in range(max(counts) + 1):
        count = counts.get(number, 0)
        height = 100 * count / most
        share = f"{count / total:.0%}" if count else ""
        cells.append(
            f'<div title="{number}: {count:,}"><span>{share}</span>'
            f'<i class="b0" style="height:{height:.1f}%"></i><b>{number}</b></div>'
        )
    return (
        f'<figure class="card"><figcaption>{escape(title)}</figcaption>'
        f'<div class="columns">{"".join(cells)}</div></figure>'
    )


def swatch(number: int) -> str:
    """The colour of a part of a bar, for a table beside it."""
    return f'<i class="swatch b{number}"></i>'


def value(number: float, unit: str = "") -> str:
    """A number with its unit, short."""
    if unit == "%":
        return f"{100 * number:.3g} %"
    return short(number) + (f" {unit}" if unit else "")


def short(number: float) -> str:
    """A number in few characters: 1.2M, 34k, 0.0051."""
    size = abs(number)
    for least, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= least:
            return f"{number / (1e3 if letter == 'k' else least):.3g}{letter}"
    if size >= 1000:
        return f"{number:,.0f}"
    if 0 < size < 1e-3:
        return f"{number:.1e}".replace("e-0", "e-")
    return f"{number:.3g}"


def _key(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    items = "".join(
        f'<span><i class="swatch b{number}"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
    )
    return f'<span class="key">{items}</span>'


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers in a range."""
    raw = (high - low) / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
    start = math.ceil(low / step - 1e-9)
    stop = math.floor(high / step + 1e-9)
    return [number * step for number in range(start, stop + 1)] or [low]
