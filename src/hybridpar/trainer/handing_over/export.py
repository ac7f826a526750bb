"""From a model whose tables are on servers to one that holds them itself.

Shapes: U rows kept, D columns.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybridpar.checkpoint.files import write_rows
from hybridpar.errors import InputError, SpecError
from hybridpar.messages import WEIGHT
from hybridpar.specs import RemoteEmbeddingSpec
from hybridpar.trainer.handing_over.exported import ExportedModel
from hybridpar.trainer.handing_over.exported_table import ExportedTable, MappedRows, as_module
from hybridpar.trainer.tables import RemoteTables

if TYPE_CHECKING:
    from hybridpar.trainer.model import HybridModel

_PIECE_BYTES = 4 << 20  # rows are read, and written to a file, in pieces of about this size
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Exporter:
    """Reads a model's tables off the servers, into memory or into files.

    Args:
        tables: the model's tables.
        dtype: what rows are stored as; None for what the servers store them as.
        directory: for the files; None keeps the rows in memory.
        rows: for some tables, the ids whose rows are kept.

    Raises:
        SpecError: if a name, the dtype or the directory is wrong.
        InputError: if an id is out of range.
    """

    def __init__(
        self,
        tables: RemoteTables,
        *,
        dtype: torch.dtype | None,
        directory: str | os.PathLike[str] | None,
        rows: Mapping[str, Tensor],
    ) -> None:
        if dtype is not None and dtype not in _DTYPES:
            choices = ", ".join(map(str, _DTYPES))
            raise SpecError(f"export got dtype={dtype}. Give one of {choices}.")
        self._tables = tables
        self._dtype = dtype
        self._directory = None if directory is None else Path(directory)
        self._kept = {name: self._checked_ids(name, ids) for name, ids in rows.items()}
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)

    def module(self, name: str) -> nn.Module:
        """A table as a module of its own; or a hosted module, built and filled here."""
        spec = self._tables.spec(name)
        if spec.module is not None:
            with torch.random.fork_rng([]):  # what it draws is overwritten below
                module = spec.module(*spec.args, **spec.kwargs)
            module.load_state_dict(self._tables.module_state_dict(name))
            return module
        kept = self._kept.get(name)
        rows = self._in_memory(spec, kept) if self._directory is None else self._mapped(spec, kept)
        return ExportedTable(_stripped(spec), rows, kept)

    def _checked_ids(self, name: str, ids: Tensor) -> Tensor:
        spec = self._tables.spec(name)
        if spec.module is not None:
            raise SpecError(f"export got rows of '{name}', which is a module, not a table.")
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            raise InputError(f"export got rows of table '{name}' as {ids!r}. Give int64 ids.")
        padding = [] if spec.padding_idx is None else [spec.padding_idx]
        given = torch.cat([ids.detach().cpu().long().reshape(-1), torch.tensor(padding).long()])
        kept: Tensor = torch.unique(given)
        if not kept.numel() or kept[0] < 0 or kept[-1] >= spec.num_embeddings:
            raise InputError(
                f"export got rows of table '{name}' whose ids are none, or not within 0 to "
                f"{spec.num_embeddings - 1}. Give the ids whose rows are to be kept."
            )
        return kept

    def _in_memory(self, spec: RemoteEmbeddingSpec, kept: Tensor | None) -> nn.Module:
        count, dtype = _num_rows(spec, kept), self._dtype or spec.dtype
        weight, start = torch.empty(count, spec.embedding_dim, dtype=dtype), 0
        for some in self._pieces(spec, kept):
            weight[start : start + len(some)] = some
            start += len(some)
        return as_module(spec, weight, kept)

    def _mapped(self, spec: RemoteEmbeddingSpec, kept: Tensor | None) -> nn.Module:
        assert self._directory is not None
        safe = "".join(c if c.isalnum() or c in "_-." else "_" for c in spec.name)
        path = self._directory / f"{list(self._tables.specs).index(spec.name)}-{safe}.rows"
        part = f"{path.name}.part"  # a file that somebody maps must never be written
        write_rows(
            self._directory, {WEIGHT: part}, ({WEIGHT: some} for some in self._pieces(spec, kept))
        )
        (self._directory / part).replace(path)
        shape = _num_rows(spec, kept), spec.embedding_dim
        return MappedRows(path, shape, self._dtype or spec.dtype)

    def _pieces(self, spec: RemoteEmbeddingSpec, kept: Tensor | None) -> Iterator[Tensor]:
        """The rows as they are looked up, some at a time; with the one for all other ids."""
        size = max(1, _PIECE_BYTES // (spec.embedding_dim * 4))
        count = spec.num_embeddings if kept is None else kept.numel()
        for start in range(0, count, size):
            stop = min(start + size, count)
            ids = torch.arange(start, stop) if kept is None else kept[start:stop]
            rows = self._tables.read(spec.name, WEIGHT, ids).to(spec.dtype)
            if spec.max_norm is not None:  # a lookup would scale them
                torch.embedding_renorm_(
                    rows, torch.arange(len(rows)), spec.max_norm, spec.norm_type
                )
            if spec.padding_idx is not None:
                rows[ids == spec.padding_idx] = 0.0
            yield rows.to(self._dtype or spec.dtype)
        if kept is not None:
            yield torch.zeros(1, spec.embedding_dim, dtype=self._dtype or spec.dtype)


def export(
    model: HybridModel[Any],
    tables: RemoteTables,
    *,
    names: Sequence[str] | None,
    dtype: torch.dtype | None,
    rows: Mapping[str, Tensor] | None,
    directory: str | os.PathLike[str] | None,
) -> ExportedModel:
    """See :meth:`HybridModel.export`."""
    chosen = list(tables.specs) if names is None else list(dict.fromkeys(names))
    if isinstance(names, str):
        raise SpecError(f"export got tables={names!r}. Give a list of names: tables=[{names!r}].")
    for name in (*chosen, *(rows or {})):
        tables.spec(name)
        if name not in chosen:
            raise SpecError(f"export got rows of table '{name}', which tables= leaves out.")
    exporter = Exporter(tables, dtype=dtype, directory=directory, rows=rows or {})
    specs = tuple(_stripped(spec) for spec in tables.specs.values())
    plain = _copy_of(model, specs)
    return ExportedModel(plain, specs, {name: exporter.module(name) for name in chosen}).eval()


def _num_rows(spec: RemoteEmbeddingSpec, kept: Tensor | None) -> int:
    return spec.num_embeddings if kept is None else kept.numel() + 1


def _stripped(spec: RemoteEmbeddingSpec) -> RemoteEmbeddingSpec:
    """A spec without what is of no use without servers, and may be large or hard to pickle."""
    if spec.module is not None:
        return replace(spec, module=nn.Identity, args=(), kwargs={}, optimizer=torch.optim.SGD)
    return replace(spec, init=None, optimizer=None)


def _copy_of(model: HybridModel[Any], specs: tuple[RemoteEmbeddingSpec, ...]) -> HybridModel[Any]:
    """A model's dense half on the CPU, connected to nothing."""
    shell = copy.copy(model)
    unconnected = {"_tables": None, "_exchange": None, "_sparse_optimizer": None, "specs": specs}
    shell.__dict__.update(unconnected)
    try:
        return copy.deepcopy(shell).to("cpu")
    except (TypeError, RuntimeError) as error:
        raise SpecError(
            f"{type(model).__name__} holds something that cannot be copied: {error}. Keep "
            "contexts, connections and results of a forward out of the model's attributes."
        ) from error
