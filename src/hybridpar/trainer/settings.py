"""A model's training settings, checked: its consistency, and an optimizer for every table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, TypeAlias

import torch
from torch.amp.grad_scaler import GradScaler

from hybridpar.counterparts import sparse_name
from hybridpar.errors import SpecError
from hybridpar.optim import SparseOptimizerSettings
from hybridpar.specs import RemoteEmbeddingSpec

Consistency: TypeAlias = Literal["sync", "async", "bounded"]
NonFinite: TypeAlias = Literal["raise", "skip", "ignore"]
SparseSettings: TypeAlias = "SparseOptimizerSettings | Mapping[str, SparseOptimizerSettings] | None"


def _is_size(value: object) -> bool:
    """Whether it is None or a number above 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value is None or (number and value > 0)  # type: ignore[operator]


# For each setting of a loop, what it must be, and what to give instead.
_LOOP: dict[str, tuple[Callable[[object], bool], str]] = {
    "loss": (callable, "Give a function of (output, batch) that returns a scalar tensor."),
    "accumulate": (
        lambda n: isinstance(n, int) and not isinstance(n, bool) and n >= 1,
        "Give how many batches make a step: a whole number of at least 1.",
    ),
    "autocast": (
        lambda dtype: dtype in (None, torch.bfloat16, torch.float16),
        "Give torch.bfloat16, torch.float16 or None.",
    ),
    "grad_scaler": (
        lambda scaler: scaler is None or isinstance(scaler, GradScaler),
        "Give a torch.amp.GradScaler or None.",
    ),
    "clip_grad_norm": (_is_size, "Give a number above 0, or None."),
    "clip_grad_value": (_is_size, "Give a number above 0, or None."),
    "non_finite": (
        lambda policy: policy in ("raise", "skip", "ignore"),
        "Choose one of 'raise', 'skip', 'ignore'.",
    ),
    "average_by": (
        lambda who: who in ("auto", "ddp", "servers"),
        "Choose one of 'auto', 'ddp', 'servers'.",
    ),
    "ddp": (
        lambda options: options is None or isinstance(options, Mapping),
        "Give a dict of DistributedDataParallel's keyword arguments.",
    ),
    "schedulers": (
        callable,
        "Give a function of (dense optimizer or None, sparse optimizer) that returns a list of "
        "torch's learning-rate schedulers.",
    ),
}


def check_loop(**settings: object) -> None:
    """Refuse a setting of `TrainerLoop` that is of the wrong kind or out of its range."""
    for name, value in settings.items():
        fits, mend = _LOOP[name]
        if not fits(value):
            raise SpecError(f"{name} is {value!r}. {mend}")


def check_epochs(epochs: object) -> None:
    """Refuse a number of passes over the data that is none."""
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 0:
        raise SpecError(f"epochs is {epochs!r}. Give how many passes: a whole number.")


def check_consistency(consistency: str, staleness: int | None) -> None:
    """Refuse a consistency that does not exist, or a staleness that does not go with it."""
    if consistency not in ("sync", "async", "bounded"):
        raise SpecError(
            f"consistency is {consistency!r}. Choose one of 'sync', 'async', 'bounded'."
        )
    if consistency == "bounded" and (
        not isinstance(staleness, int) or isinstance(staleness, bool) or staleness < 0
    ):
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
        tables = ", ".join(f"'{spec.name}'" for spec in specs if spec.module is None) or "none"
        raise SpecError(
            f"sparse_optimizer names {', '.join(map(str, by_table))}, which are no tables. The "
            f"model's tables: {tables}. (A hosted module has its optimizer in its spec.)"
        )
    return tuple(filled)


def _wrong_optimizer(table: str, settings: object) -> str:
    """Says which setting takes the place of a dense optimizer, or that there is none."""
    name = sparse_name(settings)
    if settings is None:
        return (
            f"Table '{table}' has no optimizer. Give sparse_optimizer=hybridpar.optim.{name}"
            "(lr=0.05), or the spec one of its own."
        )
    return (
        f"Table '{table}' got {settings!r} as its optimizer. It is updated on the servers: give "
        f"the settings hybridpar.optim.{name}(lr=...)."
    )
