"""`ExportedTable`: a table's rows in one process, looked up as the hybrid model looks them up.

No operation here depends on the values of the ids, so that torch.export can trace it.

Shapes: N ids, B bags, L ids a bag where every bag has the same length, U rows kept, D columns.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from hybridpar.errors import CheckpointError
from hybridpar.features import FeatureValue, check
from hybridpar.specs import Mode, RemoteEmbeddingSpec


class MappedRows(nn.Module):
    """Rows in a file of raw values, mapped into memory: read from the disk as they are touched.

    Saving it saves the file's path, not the rows.

    Args:
        path: the file.
        shape: (rows, D).
        dtype: of its values.
    """

    def __init__(self, path: Path, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.path = str(path.absolute())
        self.shape = shape
        self.dtype = dtype
        self._mapped = self._map()

    @property
    def weight(self) -> Tensor:
        """The rows: (rows, D). Not to be written.

        Raises:
            CheckpointError: if the file is not there, or not as long as it was.
        """
        if self._mapped is None:
            path = Path(self.path)
            state = f"has {path.stat().st_size} bytes" if path.is_file() else "is not there"
            raise CheckpointError(
                f"The file of rows {path} {state}, and should have {self._num_bytes} bytes. If the "
                "folder was moved, call exported.move_tables(directory) with where it is now."
            )
        return self._mapped

    def move(self, directory: Path) -> None:
        """Take the rows from the file of the same name in another folder."""
        self.path = str(directory.absolute() / Path(self.path).name)
        self._mapped = self._map()

    @property
    def _num_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def _map(self) -> Tensor | None:
        """The file, if it is there and whole. At once: what traces a module cannot map."""
        path = Path(self.path)
        if not path.is_file() or path.stat().st_size != self._num_bytes:
            return None
        count = self.shape[0] * self.shape[1]
        return torch.from_file(self.path, False, count, dtype=self.dtype).view(self.shape)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_mapped"}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mapped = self._map()


class ExportedTable(nn.Module):
    """One table: its rows, and what the ids of its features mean.

    Args:
        spec: the table.
        rows: an :class:`torch.nn.Embedding`, :class:`torch.nn.EmbeddingBag` or `MappedRows`.
        kept: (U,) int64, the ids whose rows these are, ascending; one more row, the last one, is
            for all other ids. None if there is a row for every id.
    """

    kept: Tensor | None

    def __init__(self, spec: RemoteEmbeddingSpec, rows: nn.Module, kept: Tensor | None) -> None:
        super().__init__()
        self.rows = rows
        self.register_buffer("kept", kept)
        self._mode = spec.mode
        self._padding = _padding_row(spec, kept)
        size = spec.num_embeddings if kept is None else sys.maxsize  # any id may come
        self._checked = replace(spec, num_embeddings=size, padding_idx=None)

    @property
    def weight(self) -> Tensor:
        """The rows: (num_embeddings, D), or (U + 1, D) if only some are kept."""
        weight: object = self.rows.weight
        assert isinstance(weight, Tensor)
        return weight

    @override
    def forward(self, feature: str, value: FeatureValue) -> Tensor:
        """The embedding of one feature, as :meth:`HybridModel.lookup` gives it.

        Args:
            feature: its name, for messages.
            value: its ids, as ``sparse_inputs`` gives them.

        Raises:
            InputError: as in training, if a value has the wrong form, or an id is out of range.
        """
        if not torch.compiler.is_compiling():  # a traced program has no errors of its own
            check(feature, self._checked, value, "the exported model")
        parts = value if isinstance(value, tuple) else (value,)
        ids, offsets, weights = (*parts, None, None)[:3]
        assert ids is not None
        jagged = ids if ids.is_nested else None
        if jagged is not None:
            ids, offsets = jagged.values(), jagged.offsets()[:-1]  # type: ignore[attr-defined]
        places = self._places(ids.to(self.weight.device))
        if self._mode is not None:
            return self._pooled(places, offsets, weights)
        rows = F.embedding(places, self.weight, self._padding).float()
        if jagged is None:
            return rows
        offsets = jagged.offsets().to(rows.device)  # type: ignore[attr-defined]
        return torch.nested.nested_tensor_from_jagged(rows, offsets)

    def _places(self, ids: Tensor) -> Tensor:
        """In which row of the weight each id is."""
        if self.kept is None:
            return ids.long()
        kept = self.kept.to(ids.device)
        last = kept.numel()
        places = _last_not_above(kept, ids.long())
        return torch.where(kept[places] == ids, places, last)

    def _pooled(self, places: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        if offsets is None:
            length = 1 if places.dim() == 1 else places.shape[1]
            offsets = torch.arange(places.shape[0], device=places.device) * length
        else:
            offsets = offsets.to(places.device, torch.int64)
        if weights is not None:
            weights = weights.reshape(-1).to(places.device, torch.float32)
        places = places.reshape(-1)
        assert self._mode is not None
        if self.weight.dtype != torch.float32:
            rows = F.embedding(places, self.weight, self._padding).float()
            counted = None if self._padding is None else places != self._padding
            return _pool(self._mode, rows, offsets, weights, counted)
        return F.embedding_bag(
            places, self.weight, offsets, mode=self._mode, per_sample_weights=weights,
            padding_idx=self._padding,
        )  # fmt: skip


def _last_not_above(ordered: Tensor, values: Tensor) -> Tensor:
    """For each value, where the last entry not above it is; 0 if all are. A binary search.

    It is spelled out since ONNX has no ``searchsorted``.
    """
    places = torch.zeros_like(values)
    step = 1 << ordered.numel().bit_length() - 1
    while step:
        ahead = places + step
        inside = ahead.clamp(max=ordered.numel() - 1)
        places = torch.where((ahead == inside) & (ordered[inside] <= values), ahead, places)
        step >>= 1
    return places


def _pool(
    mode: Mode, rows: Tensor, offsets: Tensor, weights: Tensor | None, counted: Tensor | None
) -> Tensor:
    """What ``embedding_bag`` gives for a row each id: that would want to know N when traced.

    Args:
        mode: how to pool.
        rows: (N, D) float32.
        offsets: (B,) int64.
        weights: (N,) float32; None for ones.
        counted: (N,) bool, which rows count; None for all.
    """
    numbers = torch.arange(rows.shape[0], device=rows.device)
    starts = numbers.new_zeros(rows.shape[0] + 1).index_add(0, offsets, torch.ones_like(offsets))
    bags = starts.cumsum(0)[:-1] - 1  # which bag each id is in
    counted = torch.ones_like(numbers) if counted is None else counted.long()
    lengths = torch.zeros_like(offsets).index_add(0, bags, counted).unsqueeze(1)
    if mode == "max":
        least = torch.finfo(torch.float32).min
        rows = rows.masked_fill(counted.unsqueeze(1) == 0, least)
        start = rows.new_full((offsets.shape[0], rows.shape[1]), least)
        found = start.scatter_reduce(0, bags.unsqueeze(1).expand_as(rows), rows, "amax")
        return found.masked_fill(lengths == 0, 0.0)
    factors = counted if weights is None else counted * weights
    start = rows.new_zeros(offsets.shape[0], rows.shape[1])
    total = start.index_add(0, bags, rows * factors.unsqueeze(1))
    return total if mode == "sum" else total / lengths.clamp(min=1)


def as_module(spec: RemoteEmbeddingSpec, weight: Tensor, kept: Tensor | None) -> nn.Module:
    """Rows in memory, as the ordinary torch module that the table's mode goes with."""
    padding = _padding_row(spec, kept)
    count, columns = weight.shape
    if spec.mode is None:
        return nn.Embedding(count, columns, padding, _weight=weight)
    return nn.EmbeddingBag(count, columns, mode=spec.mode, padding_idx=padding, _weight=weight)


def _padding_row(spec: RemoteEmbeddingSpec, kept: Tensor | None) -> int | None:
    """In which row of the weight the padding id is."""
    if spec.padding_idx is None or kept is None:
        return spec.padding_idx
    return int(torch.searchsorted(kept, spec.padding_idx))
