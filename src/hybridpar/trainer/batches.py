"""`Batches`: any source of batches, as one iterator an epoch; and a batch's way to its device."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hybridpar.errors import InputError
from hybridpar.trainer.checkpointing.checkpoint import Position

Batch = TypeVar("Batch")

_logger = logging.getLogger("hybridpar")


class Batches(Generic[Batch]):
    """One pass over the data after another, whatever the data came as.

    Args:
        source: an iterable, a one-shot iterator, or a function from the epoch to an iterable.
            Text is none.
        epochs: how many passes will be asked for. A one-shot iterator is kept in memory only if
            there is more than one.

    Raises:
        InputError: from :meth:`epoch`, if the source is none of these.
    """

    def __init__(
        self, source: Iterable[Batch] | Callable[[int], Iterable[Batch]], epochs: int
    ) -> None:
        self._source = source
        self._once = isinstance(source, Iterator)
        self._keep = self._once and epochs > 1
        self._kept: list[Batch] = []
        self._passes = 0

    def epoch(self, number: int) -> Iterator[Batch]:
        """The batches of the next pass; ``number`` is what functions and samplers are told."""
        self._passes += 1
        source = self._source
        if isinstance(source, Iterator):
            return self._first_pass(source) if self._passes == 1 else iter(self._kept)
        if callable(source) and not isinstance(source, Iterable):
            return _iterator(source(number), "fit's function of the epoch returned")
        self._tell_sampler(number)
        return _iterator(source, "fit got")

    def resumed(self, number: int, position: Position | None) -> tuple[int, Iterator[Batch]]:
        """The batches of a pass, or those of it that were not used before a checkpoint.

        Args:
            number: as for :meth:`epoch`.
            position: how far the pass had come.

        Returns:
            How many batches of the pass had been used, and an iterator over the others.
        """
        load = getattr(self._source, "load_state_dict", None)
        if position is not None and position.data is not None and load is not None:
            load(position.data)
            return position.batches, self.epoch(number)
        stream = self.epoch(number)
        used = 0 if position is None else position.batches
        next(itertools.islice(stream, used, used), None)  # gone through, and let go
        return used, stream

    def state(self) -> object:
        """Where the data are, as they tell it by ``state_dict``; None if they do not."""
        tell = getattr(self._source, "state_dict", None)
        return tell() if tell is not None and hasattr(self._source, "load_state_dict") else None

    def _first_pass(self, source: Iterator[Batch]) -> Iterator[Batch]:
        empty = True
        for batch in source:
            empty = False
            if self._keep:
                self._kept.append(batch)
            yield batch
        if empty:
            _logger.warning(
                "fit got an iterator with nothing left in it. Is it used a second time?"
            )

    def _tell_sampler(self, number: int) -> None:
        """As DistributedSampler wants, so that each epoch is shuffled differently."""
        sampler = getattr(self._source, "sampler", None)
        inner = getattr(getattr(self._source, "batch_sampler", None), "sampler", None)
        for holder in {id(h): h for h in (self._source, sampler, inner)}.values():
            set_epoch = getattr(holder, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(number)


def _iterator(source: object, who: str) -> Iterator[Any]:
    try:
        if isinstance(source, (str, bytes)):
            raise TypeError("text has no batches")
        return iter(source)  # type: ignore[call-overload, no-any-return]
    except TypeError as error:
        raise InputError(
            f"{who} batches of type {type(source).__name__}. Give an iterable of batches, or a "
            "function that returns one for an epoch."
        ) from error


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on ``device``.

    Looks into dicts, lists, tuples and named tuples, and calls ``to`` of whatever else has one; all
    that is left stays as it is.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    move = getattr(batch, "to", None)
    return move(device) if callable(move) else batch
