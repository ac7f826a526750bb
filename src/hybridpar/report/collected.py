"""`Collected`: what a page needs of a run, in bounded memory, from the entries of a JSONL log."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridpar.errors import SpecError

_MOST_POINTS = 400  # of a curve; beyond twice as many, neighbours become one
_KEPT = 1000  # evaluations and checkpoints
_FORMAT = 1


@dataclass(slots=True)
class Point:
    """Some steps in a row, as sums."""

    step: int
    steps: int
    samples: float  # of all trainers
    seconds: float
    waiting: float
    losses: float
    num_losses: int
    metrics: dict[str, float]

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Point:
        """An entry of the log."""
        loss = entry.get("loss")
        return cls(
            step=int(entry["step"]),
            steps=int(entry["steps"]),
            samples=float(entry.get("samples_of_all", 0)),
            seconds=float(entry["seconds"]),
            waiting=float(entry["waiting"]),
            losses=0.0 if loss is None else float(loss),
            num_losses=int(loss is not None),
            metrics={k: float(v) for k, v in entry.get("metrics", {}).items() if v is not None},
        )

    def joined(self, other: Point) -> Point:
        """With the steps after it."""
        return Point(
            other.step, self.steps + other.steps, self.samples + other.samples,
            self.seconds + other.seconds, self.waiting + other.waiting,
            self.losses + other.losses, self.num_losses + other.num_losses,
            {**self.metrics, **other.metrics},
        )  # fmt: skip

    @property
    def loss(self) -> float | None:
        """The mean of its losses that are finite."""
        return self.losses / self.num_losses if self.num_losses else None


@dataclass(slots=True)
class Collected:
    """A run, entry after entry.

    Attributes:
        plan: what `hybridpar plan` foretold, as `PlanReport.to_dict` gives it.
        start: the newest start: where tables are, settings, versions.
        first_time: when the first fit began.
        points: the curves.
        evaluations: the newest evaluations.
        checkpoints: the newest checkpoints.
        ends: how many fits have ended.
        last: the newest end or failure, None while a fit runs.
        steps: of all fits, as are samples, seconds and servers.
        profile: the newest.
    """

    plan: Mapping[str, Any] | None = None
    start: dict[str, Any] = field(default_factory=dict)
    first_time: float | None = None
    points: list[Point] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    ends: int = 0
    last: dict[str, Any] | None = None
    steps: int = 0
    skipped: int = 0
    seconds: float = 0.0
    samples: int = 0
    servers: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    profile: dict[str, Any] | None = None
    newest_time: float = 0.0

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Collected:
        """What a JSONL log holds. A last line that was cut short is left out.

        Raises:
            SpecError: if it is no such log.
        """
        found = cls()
        try:
            with Path(path).open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    try:
                        entry = json.loads(line)
                    except ValueError as error:
                        if not line.endswith("\n"):  # the process was killed in the midst of it
                            break
                        raise SpecError(f"{path}, line {number}: no JSON ({error}).") from error
                    found.add(entry)
        except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, SpecError):
                raise
            raise SpecError(
                f"{path} cannot be read as a log of callbacks.JSONL: {type(error).__name__}: "
                f"{error}"
            ) from error
        if not found.start:
            raise SpecError(f"{path} has no start of a run: it is no log of callbacks.JSONL.")
        return found

    def add(self, entry: Mapping[str, Any]) -> None:
        """One more entry."""
        kind = entry["record"]
        self.newest_time = max(self.newest_time, entry.get("time") or 0.0)
        if kind == "start":
            self._begin(dict(entry))
        elif kind == "step":
            self._add_point(Point.of(entry))
        elif kind == "evaluation":
            self.evaluations = [*self.evaluations, dict(entry)][-_KEPT:]
        elif kind == "checkpoint":
            self.checkpoints = [*self.checkpoints, dict(entry)][-_KEPT:]
        elif kind in ("end", "failure"):
            self._end(dict(entry))

    @property
    def step_seconds(self) -> float:
        """Seconds in steps, evaluations left out."""
        return sum(point.seconds for point in self.points)

    @property
    def waiting(self) -> float:
        """Seconds of them in which trainer 0 waited for servers."""
        return sum(point.waiting for point in self.points)

    @property
    def samples_per_second(self) -> float:
        """Of all trainers."""
        seconds = self.step_seconds
        return sum(point.samples for point in self.points) / seconds if seconds else 0.0

    def _begin(self, entry: dict[str, Any]) -> None:
        if entry.get("format", _FORMAT) > _FORMAT:
            raise SpecError(
                f"The log is of format {entry['format']}, and this version of hybridpar reads "
                f"{_FORMAT}."
            )
        step = entry["step"]
        # What a failed attempt had done beyond its checkpoint was done again.
        self.points = [point for point in self.points if point.step <= step]
        self.evaluations = [each for each in self.evaluations if each["step"] <= step]
        self.checkpoints = [each for each in self.checkpoints if each["step"] <= step]
        self.start, self.last = entry, None
        self.first_time = entry["time"] if self.first_time is None else self.first_time

    def _add_point(self, point: Point) -> None:
        self.points.append(point)
        if len(self.points) > 2 * _MOST_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            self.points = [one.joined(other) for one, other in pairs] + (
                self.points[-1:] if len(self.points) % 2 else []
            )

    def _end(self, entry: dict[str, Any]) -> None:
        self.ends += 1
        self.last = entry
        self.steps += entry["steps"]
        self.skipped += entry["skipped"]
        self.seconds += entry["seconds"]
        self.samples += entry["samples"]
        self.profile = entry.get("profile") or self.profile
        for server in entry["servers"]:
            counts = {name: value for name, value in server.items() if name != "server"}
            self.servers[server["server"]].update(counts)
