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
from hybridpar.specs import RemoteEmbeddingSpec


class MappedRows(nn.Module):
    """Rows in a file of raw values, mapped into memory when first looked up.

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
        self._mapped: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """The rows: (rows, D), read from the disk as they are touched. Not to be written.

        Raises:
            CheckpointError: if the file is not there, or not as long as it was.
        """
        if self._mapped is None:
            rows, columns = self.shape
            wanted = rows * columns * self.dtype.itemsize
            path = Path(self.path)
            found = path.stat().st_size if path.is_file() else None
            if found != wanted:
                state = "is not there" if found is None else f"has {found} bytes, not {wanted}"
                raise CheckpointError(
                    f"The rows' file {path} {state}. If the folder was moved, call "
                    "exported.move_tables(directory) with where it is now."
                )
            flat = torch.from_file(self.path, False, rows * columns, dtype=self.dtype)
            self._mapped = flat.view(rows, columns)
        return self._mapped

    def move(self, directory: Path) -> None:
        """Take the rows from the file of the same name in another folder."""
        self.path = str(directory.absolute() / Path(self.path).name)
        self._mapped = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": None}


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
        rows = F.embedding(places, self.weight).float()
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
        places = torch.searchsorted(kept, ids.long().contiguous()).clamp(max=last - 1)
        return torch.where(kept[places] == ids, places, last)

    def _pooled(self, places: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        if offsets is None:
            length = 1 if places.dim() == 1 else places.shape[1]
            offsets = torch.arange(places.shape[0], device=places.device) * length
        else:
            offsets = offsets.to(places.device, torch.int64)
        if weights is not None:
            weights = weights.reshape(-1).to(places.device, torch.float32)
        places, source, padding = places.reshape(-1), self.weight, self._padding
        if source.dtype != torch.float32:  # pooled in float32, as the servers do
            rows = F.embedding(places, source).float()
            source = F.pad(rows, (0, 0, 0, 1))
            numbers = torch.arange(places.shape[0], device=places.device)
            if padding is not None:
                numbers = torch.where(places == padding, places.shape[0], numbers)
                padding = -1  # the row of zeros that was added
            places = numbers
        assert self._mode is not None
        return F.embedding_bag(
            places, source, offsets, mode=self._mode, per_sample_weights=weights,
            padding_idx=padding,
        )  # fmt: skip


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
