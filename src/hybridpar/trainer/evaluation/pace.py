"""`Pace`: when something is due that happens every so many steps."""

from __future__ import annotations


class Pace:
    """Counts in a trainer's steps, so that all trainers agree where they are together.

    Args:
        every: steps between two times; None for never.
        step: the steps done until now.
    """

    def __init__(self, every: int | None, step: int) -> None:
        self._every = every
        self._last = step

    @property
    def is_never(self) -> bool:
        """Whether no number of steps is given."""
        return self._every is None

    def is_due(self, step: int) -> bool:
        """Whether a multiple of ``every`` was reached since the last time; says so once."""
        last, self._last = self._last, step
        return self._every is not None and step // self._every > last // self._every
