"""How long servers take over lookups and updates: real slabs, of a size that fits here, timed here.

Shapes: B bags, D columns.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from hybridpar.messages import SlabLookup, SlabPush
from hybridpar.server.slab import Slab
from hybridpar.sharding import Plan, SlabKind, SlabLayout, SlabPart
from hybridpar.specs import RemoteEmbeddingSpec

BUDGET_S = 0.5
_SLAB_BYTES = 64 << 20  # far above any cache, far below any memory
_NAME = "calibration"


def server_seconds(
    plan: Plan, asked: Mapping[tuple[int, int], Sequence[SlabLookup]]
) -> list[float]:
    """Seconds that each server takes over one step of all trainers.

    Slabs of one kind are alike, so the busiest of each kind is timed, and the others are taken to
    cost as much an id.

    Args:
        plan: where the tables are.
        asked: by server and slab, all trainers' lookups of one step.
    """
    busiest: dict[SlabKind, tuple[int, int]] = {}
    for key in sorted(asked, key=lambda key: _ids(asked[key])):
        busiest[_layout(plan, key).kind] = key
    cost = {
        kind: _seconds(_layout(plan, key), asked[key], BUDGET_S / len(busiest)) / _ids(asked[key])
        for kind, key in busiest.items()
        if _ids(asked[key])
    }
    seconds = [0.0] * len(plan.slabs)
    for key, lookups in asked.items():
        seconds[key[0]] += _ids(lookups) * cost.get(_layout(plan, key).kind, 0.0)
    return seconds


def _layout(plan: Plan, key: tuple[int, int]) -> SlabLayout:
    return plan.slabs[key[0]][key[1]]


def _ids(lookups: Sequence[SlabLookup]) -> int:
    return sum(lookup.indices.numel() for lookup in lookups)


def _seconds(layout: SlabLayout, lookups: Sequence[SlabLookup], budget_s: float) -> float:
    """The fastest of several steps: one lookup a trainer, and one update of all."""
    kind = layout.kind
    row_bytes = 4 * (kind.num_columns + sum(kind.settings.state_widths(kind.num_columns).values()))
    num_rows = max(1, min(layout.num_rows, _SLAB_BYTES // row_bytes))
    spec = RemoteEmbeddingSpec(
        _NAME, num_embeddings=num_rows, embedding_dim=kind.num_columns,
        dtype=kind.dtype, init=torch.nn.init.zeros_,
    )  # fmt: skip
    part = SlabPart(_NAME, 0, 1, 0, 0, num_rows)
    slab = Slab(SlabLayout(kind, (part,)), {_NAME: spec}, "")
    here = [SlabLookup(lookup.indices % num_rows, lookup.offsets) for lookup in lookups]
    pushes = [
        SlabPush(lookup, torch.full((_num_bags(lookup), kind.num_columns), 1e-3)) for lookup in here
    ]
    fastest, limit = float("inf"), time.perf_counter() + budget_s
    with torch.no_grad():
        for t in range(1, 1000):
            started = time.perf_counter()
            for lookup in here:
                slab.lookup(lookup)
            slab.apply(pushes, lr=1e-3, divisor=len(pushes), t=t)
            now = time.perf_counter()
            fastest = min(fastest, now - started)
            if now > limit and t > 1:  # the first touches the memory
                break
    return fastest


def _num_bags(lookup: SlabLookup) -> int:
    return (lookup.indices if lookup.offsets is None else lookup.offsets).numel()
