"""Batches of clicks for both twins, how trainers share them, and random ones.

The last seventh of the samples is for testing: of Criteo's Kaggle file, that is its last day.

Shapes: B samples, D numbers a sample, N ids of all bags of a table together.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

DAYS = 7
DENSE, LENGTH, ID, WEIGHT, LABEL = range(5)  # what is drawn


class Batch(NamedTuple):
    """Samples side by side."""

    dense: Tensor  # (B, D) float32
    ids: tuple[Tensor, ...]  # a table: int64, (B,) if every bag holds one id, else (N,)
    offsets: tuple[Tensor, ...]  # a table: (B,) int64, where bags begin; empty if (B,) ids
    labels: Tensor  # (B,) float32: 1 if clicked, else 0


class Clicks(ABC):
    """Samples in a fixed order: the batches to train on, then those to test with.

    Attributes:
        num_dense: D.
        table_sizes: the number of rows of each table.
        num_samples: those to train on and those to test with.
    """

    num_dense: int
    table_sizes: list[int]
    num_samples: int

    @property
    def num_train(self) -> int:
        """The samples before the test samples."""
        return self.num_samples - self.num_samples // DAYS

    def train(self, size: int, rank: int = 0, num_trainers: int = 1) -> Iterator[Batch]:
        """One trainer's share of each batch; the trainers' shares make up a batch.

        Args:
            size: samples in a whole batch; the samples left over at the end are dropped.
            rank: whose share.
            num_trainers: how many shares a batch is cut into.
        """
        if size % num_trainers:
            raise ValueError(f"A batch of {size} cannot be shared evenly by {num_trainers}.")
        part = size // num_trainers
        for chunk in self.chunks(0, self.num_train, size):
            if len(chunk) == size:
                yield self.batch(chunk[part * rank : part * (rank + 1)])

    def test(self, size: int, rank: int = 0, num_trainers: int = 1) -> Iterator[Batch]:
        """The test batches that fall to a trainer, each one whole."""
        chunks = self.chunks(self.num_train, self.num_samples, size)
        for chunk in islice(chunks, rank, None, num_trainers):
            yield self.batch(chunk)

    @abstractmethod
    def chunks(self, first: int, last: int, size: int) -> Iterator[Sequence]:
        """Samples ``first`` to ``last``, ``size`` at a time, in whatever form ``batch`` takes."""

    @abstractmethod
    def batch(self, chunk: Sequence) -> Batch:
        """These samples as a batch."""


class RandomClicks(Clicks):
    """Random samples, as DLRM's ``--data-generation random``, but with something to learn.

    Sample i is the same in every epoch and whatever the batch size. Ids are uniform and may repeat
    in a bag. Every row of a table has a weight that nobody is told; the weights of a sample's rows
    and its numbers give the chance of a click.

    Args:
        num_samples: how many to train on and to test with.
        num_dense: D.
        table_sizes: the number of rows of each table.
        num_indices: ids in a bag at the most; at the least 1.
        fixed: whether every bag has that many.
        seed: other seeds, other samples.
    """

    def __init__(
        self,
        num_samples: int,
        num_dense: int,
        table_sizes: Sequence[int],
        num_indices: int = 1,
        fixed: bool = False,
        seed: int = 0,
    ) -> None:
        self.num_samples, self.num_dense = num_samples, num_dense
        self.table_sizes = list(table_sizes)
        self._num_indices, self._fixed, self._seed = num_indices, fixed, seed

    def chunks(self, first: int, last: int, size: int) -> Iterator[Sequence]:
        for start in range(first, last, size):
            yield range(start, min(start + size, last))

    def batch(self, chunk: Sequence) -> Batch:
        samples = torch.tensor(chunk).unsqueeze(1)
        dense = self._draw(DENSE, samples, torch.arange(self.num_dense))
        score = 2 * (dense - 0.5).sum(1)
        ids, offsets = [], []
        for table, size in enumerate(self.table_sizes):
            most = self._num_indices
            drawn = self._draw(LENGTH, samples, torch.tensor([table]))
            lengths = torch.full_like(samples, most) if self._fixed else 1 + (drawn * most).long()
            place = torch.arange(most)
            bags = (self._draw(ID, samples, table * most + place) * size).long()
            used = place < lengths
            weights = 2 * self._draw(WEIGHT, bags, torch.tensor(table)) - 1
            score += 4 * (weights * used).sum(1) / lengths.squeeze(1)
            ids.append(bags[used])
            offsets.append((lengths.cumsum(0) - lengths).squeeze(1))
        labels = self._draw(LABEL, samples, torch.tensor([0])).squeeze(1) < score.sigmoid()
        return Batch(dense.float(), tuple(ids), tuple(offsets), labels.float())

    def _draw(self, what: int, rows: Tensor, columns: Tensor) -> Tensor:
        """A float64 from 0 to below 1 for each pair of whole numbers, always the same."""
        mixed = torch.tensor(self._seed)
        for key in (what, rows, columns):
            mixed = (mixed ^ key) * -7046029254386353131  # Steele et al., SplitMix, 2014
            mixed = mixed ^ (mixed >> 32)
        return (mixed & (2**53 - 1)).double() / 2**53
