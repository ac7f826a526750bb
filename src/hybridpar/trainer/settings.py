"""A model's training settings, checked: its consistency, and an optimizer for every table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, TypeAlias

import torch

from hybridpar import optim
from hybridpar.errors import SpecError
from hybridpar.optim import SparseOptimizerSettings
from hybridpar.specs import RemoteEmbeddingSpec

Consistency: TypeAlias = Literal["sync", "async", "bounded"]
SparseSettings: TypeAlias = "SparseOptimizerSettings | Mapping[str, SparseOptimizerSettings] | None"


def check_consistency(consistency: str, staleness: int | None) -> None:
    """Refuse a consistency that does not exist, or a staleness that does not go with it."""
    if consistency not in ("sync", "async", "bounded"):
        raise SpecError(
            f"consistency is {consistency!r}. Choose one of 'sync', 'async', 'bounded'."
        )
    if consistency == "bounded" and (not isinstance(staleness, int) or staleness < 0):
        raise SpecError(
            f"consistency='bounded' got staleness={staleness!r}. Say by how many steps rows may be "
            "behind: a whole number of at least 0."
        )
    if consistency != "bounded" and staleness is not None:
        raise SpecError(
            f"staleness={staleness!r} goes with consistency='bounded', not {consistency!r}."
        )


def check_wire_dtype(dtype: object) -> None:
    """Refuse a dtype that rows and gradients cannot be sent as."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise SpecError(
            f"wire_dtype is {dtype!r}. Choose torch.float32, torch.bfloat16 or torch.float16."
        )


def with_optimizers(
    specs: tuple[RemoteEmbeddingSpec, ...], given: SparseSettings
) -> tuple[RemoteEmbeddingSpec, ...]:
    """The specs, each table's optimizer filled in."""
    by_table = dict(given) if isinstance(given, Mapping) else None
    filled = []
    for spec in specs:
        if spec.module is None:
            named = None if by_table is None else by_table.pop(spec.name, None)
            settings = named or spec.optimizer or (given if by_table is None else None)
            if not isinstance(settings, SparseOptimizerSettings):
                raise SpecError(_wrong_optimizer(spec.name, settings))
            spec = replace(spec, optimizer=settings)
        filled.append(spec)
    if by_table:
        raise SpecError(f"sparse_optimizer names {', '.join(by_table)}, which are no tables.")
    return tuple(filled)


def _wrong_optimizer(table: str, settings: object) -> str:
    """Says which setting takes the place of a dense optimizer, or that there is none."""
    name = optim.sparse_name(settings)
    if settings is None:
        return (
            f"Table '{table}' has no optimizer. Give sparse_optimizer=hybridpar.optim.{name}"
            "(lr=0.05), or the spec one of its own."
        )
    return (
        f"Table '{table}' got {settings!r} as its optimizer. It is updated on the servers: give "
        f"the settings hybridpar.optim.{name}(lr=...)."
    )
