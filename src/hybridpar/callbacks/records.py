"""What callbacks are told: frozen records of a run, its steps, evaluations, checkpoints and end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from hybridpar.callbacks.servers import PlannedServer, PlannedTable, ServerTraffic

Histogram: TypeAlias = "Mapping[str, Mapping[int, int]]"
"""For each table, how often the rows of a batch lacked so many steps of the slowest trainer."""


def _nothing(_: object) -> dict[str, float]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One call of ``fit``, as it begins.

    Attributes:
        rank: this trainer's rank.
        num_trainers: how many there are.
        num_servers: how many parameter servers.
        step: optimizer steps done before; above 0 after a resume, and in a second ``fit``.
        first_epoch: passes over the data done before.
        epochs: passes to come.
        steps_an_epoch: of this trainer, the last epoch's or what the data's length says; None if
            it is not known.
        attempt: how often the job has been restarted before.
        host: this trainer's host.
        device: where its dense half runs.
        consistency: ``"sync"``, ``"async"`` or ``"bounded"``.
        tables: the plan, by table.
        servers: the plan, by server.
        settings: the loop's settings, as text.
        versions: of hybridpar, torch and Python.
        time: when it began, in seconds since 1970.
    """

    rank: int
    num_trainers: int
    num_servers: int
    step: int = 0
    first_epoch: int = 0
    epochs: int = 1
    steps_an_epoch: int | None = None
    attempt: int = 0
    host: str = ""
    device: str = "cpu"
    consistency: str = "sync"
    tables: tuple[PlannedTable, ...] = ()
    servers: tuple[PlannedServer, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    time: float = 0.0
    _rates: Callable[[], Mapping[str, float]] = field(default=dict, repr=False, compare=False)

    def learning_rates(self) -> Mapping[str, float]:
        """The learning rates of now: ``"dense"`` and ``"sparse"``, or one for each group.

        A group of the sparse optimizer is named by its tables, as in ``"sparse/item+user"``.
        """
        return self._rates()

    def __getstate__(self) -> dict[str, object]:
        """Pickled, it keeps the learning rates of that moment."""
        return self.__dict__ | {"_rates": partial(dict, self._rates())}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step of this trainer, just done.

    ``loss``, ``metrics`` and ``servers`` are worked out when they are first looked at. On CUDA
    looking at the loss waits for the device, so a callback that needs it now and then should look
    now and then.

    Attributes:
        step: optimizer steps done, this one included: the first is 1.
        epoch: the pass over the data it is in, counted from 0.
        step_in_epoch: steps of this trainer in the epoch, this one included.
        steps_an_epoch: how many the epoch has; None if it is not known.
        loss_tensor: this trainer's loss, a scalar on its device.
        samples: of this trainer, in the batches of the step.
        num_trainers: trainers that took part in the step.
        seconds: since the step before was done; evaluations are left out.
        waiting: seconds of them in which this trainer waited for servers.
        skipped: whether all trainers left the step out.
        staleness: a histogram for each table, over all steps so far; all 0 in sync mode.
        time: when it was done, in seconds since 1970.
    """

    step: int
    epoch: int
    step_in_epoch: int
    steps_an_epoch: int | None
    loss_tensor: Tensor
    samples: int
    num_trainers: int
    seconds: float
    waiting: float
    skipped: bool = False
    staleness: Histogram = field(default_factory=dict)
    time: float = 0.0
    _measure: Callable[[Step], Mapping[str, float]] = field(
        default=_nothing, repr=False, compare=False
    )
    _servers: Callable[[], tuple[ServerTraffic, ...]] = field(
        default=tuple, repr=False, compare=False
    )

    @cached_property
    def loss(self) -> float:
        """This trainer's loss."""
        return float(self.loss_tensor)

    @cached_property
    def metrics(self) -> Mapping[str, float]:
        """What the callbacks' :meth:`Callback.measure` say of the step, all together."""
        return self._measure(self)

    @cached_property
    def servers(self) -> tuple[ServerTraffic, ...]:
        """What has been exchanged with each server so far."""
        return self._servers()

    def __getstate__(self) -> dict[str, object]:
        """Pickled, it keeps what has been looked at."""
        return self.__dict__ | {"_measure": _nothing, "_servers": tuple}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One evaluation during :meth:`TrainerLoop.fit`; alike on all trainers.

    Attributes:
        step: optimizer steps done.
        epoch: passes over the data done, in the life of the loop.
        results: the loss and the metrics, by name.
        time: when it was done, in seconds since 1970.
    """

    step: int
    epoch: int
    results: Mapping[str, float]
    time: float = field(default=0.0, compare=False)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that has become current. Trainer 0 alone is told.

    Attributes:
        path: its folder.
        step: optimizer steps done when it was taken.
        num_bytes: of its own files.
        seconds: from when it was taken until it was current.
        time: when it became current, in seconds since 1970.
    """

    path: Path
    step: int
    num_bytes: int
    seconds: float
    time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time went, after ``fit(profile=True)``; seconds, as in ``FitResult.profile``."""

    steps: int
    seconds: float
    trainer: Mapping[str, float]
    all_reduce: float
    servers: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class End:
    """What a fit did on this trainer, or had done when it failed.

    Attributes:
        step: optimizer steps done, those before the fit included.
        steps: of this fit, those that this trainer had a batch for.
        skipped: how many of them were left out.
        samples: of this trainer.
        seconds: wall-clock time.
        waiting: seconds of them in which this trainer waited for servers.
        epoch_losses: the mean loss of each epoch; empty after a failure.
        staleness: a histogram for each table.
        servers: what was exchanged with each server.
        profile: where the time went, if asked for.
        time: when it ended, in seconds since 1970.
    """

    step: int
    steps: int
    skipped: int
    samples: int
    seconds: float
    waiting: float
    epoch_losses: tuple[float, ...] = ()
    staleness: Histogram = field(default_factory=dict)
    servers: tuple[ServerTraffic, ...] = ()
    profile: Profile | None = None
    time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What ended a fit before its time.

    Attributes:
        error: the exception.
        end: what had been done.
    """

    error: BaseException
    end: End


def as_json(value: object) -> object:
    """A record, or a part of one, as what JSON can hold; a number that is not finite is None."""
    if is_dataclass(value):
        public = [item.name for item in fields(value) if not item.name.startswith("_")]
        return {name: as_json(getattr(value, name)) for name in public}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [as_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)
