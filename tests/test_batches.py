"""Any source of batches, epoch by epoch; and a batch's way to its device."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import hybridpar as hp
from hybridpar.trainer.batches import Batches, to_device


def drawn(source: object, epochs: int = 3) -> list[list[int]]:
    batches = Batches(source, epochs)
    return [list(batches.epoch(number)) for number in range(epochs)]


class OldStyle:
    """Iterable by index alone, like a map-style dataset."""

    def __getitem__(self, index: int) -> int:
        if index > 1:
            raise IndexError
        return index


class Sampled:
    """Like a DataLoader: its sampler wants to know the epoch."""

    def __init__(self) -> None:
        self.sampler = self
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self):
        return iter([self.epochs[-1]])


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ([0, 1], [[0, 1]] * 3),
        ((number for number in range(2)), [[0, 1]] * 3),
        (lambda epoch: range(epoch), [[], [0], [0, 1]]),
        (OldStyle(), [[0, 1]] * 3),
        (Sampled(), [[0], [1], [2]]),
    ],
    ids=["list", "generator", "function", "getitem", "sampler"],
)
def test_every_kind_of_source(source: object, wanted: list[list[int]]) -> None:
    assert drawn(source) == wanted


def test_one_pass_keeps_nothing() -> None:
    batches = Batches(iter(range(5)), epochs=1)
    assert list(batches.epoch(0)) == list(range(5))
    assert batches._kept == []


def test_what_is_no_source() -> None:
    with pytest.raises(hp.InputError, match="fit got batches of type int"):
        drawn(3)


class Pair(NamedTuple):
    left: torch.Tensor
    right: object


def test_tensors_are_moved_wherever_they_are() -> None:
    here, meta = torch.ones(2), torch.device("meta")
    moved = to_device({"a": [here, "text"], "b": Pair(here, (here, 3))}, meta)
    assert moved["a"][0].device == moved["b"].left.device == moved["b"].right[0].device == meta
    assert isinstance(moved["b"], Pair)
    assert (moved["a"][1], moved["b"].right[1]) == ("text", 3)
