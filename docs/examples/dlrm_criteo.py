"""Criteo's clicks for both twins: the Kaggle TSV, streamed, or the .npz that DLRM makes of it.

A sample is 13 numbers, 26 categories, and whether the ad was clicked. As in DLRM, a missing number
or category counts as 0, and numbers become log(x + 1) with x at least 0.
"""

import gzip
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path

import torch
from dlrm_data import Batch, Clicks
from torch import Tensor

NUM_DENSE, NUM_TABLES = 13, 26
UNKNOWN = 0  # the row of a category that a counted vocabulary lacks


class KaggleFile(Clicks):
    """The TSV of Criteo's Kaggle challenge, plain or gzipped, read line by line.

    No more than a batch is in memory, and a trainer parses the lines of its own share alone. A
    category is a number of up to eight hexadecimal digits, so up to 2**32 - 1. It becomes a row in
    one of two ways.

    Args:
        path: the file: label, 13 integers, 26 categories a line, separated by tabs.
        max_ind_range: if above 0, a category's row is the category modulo this, and every table has
            so many rows. Otherwise the categories of the training samples are counted, in a pass
            over the file; each gets a row in the order of appearance, after row 0 for all others.
        min_count: a category that is rarer in the training samples gets no row of its own.
    """

    def __init__(self, path: str, max_ind_range: int = -1, min_count: int = 1) -> None:
        self.path = Path(path)
        self.num_dense = NUM_DENSE
        self.max_ind_range = max_ind_range
        with self._open() as file:
            self.num_samples = sum(1 for _ in file)
        if max_ind_range > 0:
            self.table_sizes = [max_ind_range] * NUM_TABLES
        else:
            self._rows = self._vocabulary(min_count)
            self.table_sizes = [len(rows) + 1 for rows in self._rows]

    def chunks(self, first: int, last: int, size: int) -> Iterator[Sequence]:
        with self._open() as file:
            lines = islice(enumerate(file, start=1), first, last)
            while chunk := list(islice(lines, size)):
                yield chunk

    def batch(self, chunk: Sequence[tuple[int, str]]) -> Batch:
        """The batch of some lines, each with its number in the file."""
        labels, dense, categories = zip(*(self._parsed(*line) for line in chunk), strict=True)
        ids = torch.tensor(categories)
        if self.max_ind_range > 0:
            ids %= self.max_ind_range
        else:
            for column, rows in zip(ids.unbind(1), self._rows, strict=True):
                column.copy_(torch.tensor([rows.get(key, UNKNOWN) for key in column.tolist()]))
        return Batch(
            dense=_log(torch.tensor(dense)),
            ids=tuple(ids.t().contiguous()),
            offsets=(),
            labels=torch.tensor(labels),
        )

    def _vocabulary(self, min_count: int) -> list[dict[int, int]]:
        """For each table the row of each category that has one."""
        counts = [Counter() for _ in range(NUM_TABLES)]
        for chunk in self.chunks(0, self.num_train, 1):
            _, _, categories = self._parsed(*chunk[0])
            for counter, category in zip(counts, categories, strict=True):
                counter[category] += 1
        kept = [[key for key, count in c.items() if count >= min_count] for c in counts]
        return [{key: row for row, key in enumerate(keys, start=UNKNOWN + 1)} for keys in kept]

    def _open(self):
        opener = gzip.open if self.path.suffix == ".gz" else open
        return opener(self.path, "rt", encoding="ascii")

    def _parsed(self, number: int, line: str) -> tuple[float, list[int], list[int]]:
        label, *fields = line.rstrip("\r\n").split("\t")
        try:
            if len(fields) != NUM_DENSE + NUM_TABLES:
                raise ValueError(f"it has {1 + len(fields)} fields")
            dense = [int(field or "0") for field in fields[:NUM_DENSE]]
            return float(label), dense, [int(field or "0", 16) for field in fields[NUM_DENSE:]]
        except ValueError as error:
            raise ValueError(
                f"{self.path}, line {number}: {error}. Criteo's Kaggle file has a label, "
                f"{NUM_DENSE} integers and {NUM_TABLES} hexadecimal categories, separated by tabs."
            ) from error


class ProcessedFile(Clicks):
    """The .npz that DLRM makes of the Kaggle file: X_int, X_cat, y, counts.

    Each trainer holds all of it in memory, as DLRM does.

    Args:
        path: the file.
        max_ind_range: if above 0, a category's row is its number modulo this.
    """

    def __init__(self, path: str, max_ind_range: int = -1) -> None:
        self.path = path
        self.num_dense = NUM_DENSE
        self.max_ind_range = max_ind_range
        counts = [int(count) for count in self._array("counts")]
        limit = max_ind_range if max_ind_range > 0 else max(counts)
        self.table_sizes = [min(count, limit) for count in counts]
        self.num_samples = len(self._array("y"))

    def chunks(self, first: int, last: int, size: int) -> Iterator[Sequence]:
        for start in range(first, last, size):
            yield range(start, min(start + size, last))

    def batch(self, chunk: Sequence) -> Batch:
        dense, ids, labels = (array[chunk.start : chunk.stop] for array in self._arrays)
        ids = ids.long() % self.max_ind_range if self.max_ind_range > 0 else ids.long()
        return Batch(_log(dense), tuple(ids.t().contiguous()), (), labels.float())

    def __getstate__(self) -> dict[str, object]:  # an export takes no samples along
        return {name: value for name, value in vars(self).items() if name != "_arrays"}

    @cached_property
    def _arrays(self) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(self._array(name)) for name in ("X_int", "X_cat", "y"))

    def _array(self, name: str):
        try:
            import numpy
        except ImportError as error:
            raise ImportError(f"{self.path} is a NumPy file: pip install numpy.") from error
        with numpy.load(self.path) as file:
            return file[name]


def _log(numbers: Tensor) -> Tensor:
    return numbers.clamp(min=0).float().log1p()
