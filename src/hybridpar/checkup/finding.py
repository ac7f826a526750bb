"""`Finding`: what one check of the machine found."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

State: TypeAlias = Literal["ok", "warn", "fail"]


class Finding(NamedTuple):
    """What one check found.

    Attributes:
        state: ``"fail"`` if jobs cannot run, ``"warn"`` if some cannot, or run slowly.
        what: what was looked at, and what it is.
        mend: how to mend it, if there is something to mend.
    """

    state: State
    what: str
    mend: str = ""

    def lines(self) -> str:
        """As it is printed."""
        line = f"[{self.state:>4}] {self.what}"
        return f"{line}\n       {self.mend}" if self.mend else line
