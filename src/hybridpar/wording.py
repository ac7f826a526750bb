"""Numbers in words, for reports on terminals and pages."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size(num_bytes: float) -> str:
    """Bytes, in decimal units."""
    value, unit = float(num_bytes), 0
    while abs(value) >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"


def many(count: int, what: str) -> str:
    """So many of something: ``1 server``, ``2 servers``."""
    return f"{count} {what}{'' if count == 1 else 's'}"
