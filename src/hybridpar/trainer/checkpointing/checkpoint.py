"""`Checkpoint`: where and when a loop saves; `Position`: how far training had come."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from hybridpar.errors import SpecError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where and when a :class:`TrainerLoop` saves.

    Args:
        directory: for the checkpoints, one folder each. Servers and trainers must all reach it by
            this path.
        every: optimizer steps between two; None saves at the end of every epoch.
        keep: so many of the newest stay, at least 1.
        every_full: of so many checkpoints one holds all rows, and the others only those that
            changed since the one before; loading puts them together. For tables that take long to
            write. None writes all rows every time. What the kept ones need is kept too.
        wait: whether training waits until a checkpoint is written. If not, it goes on as soon as
            the servers hold on to the values of the moment.

    Raises:
        SpecError: if a number is out of its range.
    """

    directory: str | os.PathLike[str]
    _: KW_ONLY
    every: int | None = None
    keep: int = 3
    every_full: int | None = None
    wait: bool = False

    def __post_init__(self) -> None:
        for name in ("every", "keep", "every_full"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise SpecError(f"Checkpoint got {name}={value!r}. Give a number of at least 1.")


class Position(NamedTuple):
    """How far training had come.

    Attributes:
        step: optimizer steps done.
        epoch: passes over the data done.
        batches: batches used of the pass under way.
        data: the ``state_dict`` of this trainer's data, if they have one.
    """

    step: int
    epoch: int
    batches: int
    data: object = None
