"""`Snapshot`: a slab's rows as they were at one moment, written while it goes on changing.

The rows are written a chunk at a time. Before an update changes rows that are not written yet,
their old values are set aside. So no second copy of a table is made: beside a chunk, there is one
byte a row, and the rows that updates touch before they are written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from hybridpar.kernels import gather_rows

_CHUNK_BYTES = 8 << 20


class Snapshot:
    """The values of several matrices with the same rows, at the moment when it is made.

    Args:
        matrices: by name, (R, width) tensors that will go on changing.
        rows: (U,) int64, in order, the rows that are wanted; None for all.
    """

    def __init__(self, matrices: dict[str, Tensor], rows: Tensor | None = None) -> None:
        self._matrices = matrices
        self._num_rows = len(next(iter(matrices.values())))
        self._wanted = rows
        self._written = 0  # rows before this one are out
        self._is_aside = torch.zeros(self._num_rows, dtype=torch.bool)
        self._aside: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._lock = threading.Lock()

    def before_change(self, rows: Tensor) -> None:
        """Set aside what rows hold, if it is not written yet; to be called before they change.

        Args:
            rows: (N,) int64, repeats allowed.
        """
        with self._lock:
            rows = rows[rows >= self._written]
            rows = torch.unique(rows[~self._is_aside[rows]])
            if len(rows):
                self._is_aside[rows] = True
                old = {name: values[rows] for name, values in self._matrices.items()}
                self._aside.append((rows, old))

    def chunks(self) -> Iterator[dict[str, Tensor]]:
        """The wanted rows in order, some at a time: by name, (some, width) tensors."""
        row_bytes = sum(m.shape[1] * m.element_size() for m in self._matrices.values())
        size = max(1, _CHUNK_BYTES // max(1, row_bytes))
        count = self._num_rows if self._wanted is None else len(self._wanted)
        for start in range(0, count, size):
            stop = min(start + size, count)
            if self._wanted is None:
                yield self._next(torch.arange(start, stop))
            else:
                yield self._next(self._wanted[start:stop])

    def _next(self, rows: Tensor) -> dict[str, Tensor]:
        with self._lock:
            chunk = {name: gather_rows(values, rows) for name, values in self._matrices.items()}
            end = int(rows[-1]) + 1
            kept = []
            for changed, old in self._aside:
                place = torch.searchsorted(rows, changed).clamp_(max=len(rows) - 1)
                mine = rows[place] == changed
                for name, values in old.items():
                    chunk[name][place[mine]] = values[mine]
                later = changed >= end
                if later.any():
                    kept.append((changed[later], {n: values[later] for n, values in old.items()}))
            self._aside = kept
            self._written = end
            return chunk
