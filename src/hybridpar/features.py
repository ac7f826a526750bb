"""The ids of one feature of one batch, checked on the trainer and brought into one form.

Shapes: N ids, B bags, L ids a bag where every bag has the same length.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from hybridpar.errors import InputError
from hybridpar.kernels import all_below, are_starts, bag_lengths
from hybridpar.specs import RemoteEmbeddingSpec

FeatureValue: TypeAlias = Tensor | tuple[Tensor | None, ...]
"""What ``sparse_inputs`` gives for a table's feature: ``ids`` of shape (N,), (B, L) or jagged
(of any shape if the table does not pool);
``(ids, offsets)``; or ``(ids, offsets, per_sample_weights)``, with offsets None for (B, L) ids. For
a hosted module's feature: its forward's argument, or a tuple of them."""


@dataclass(frozen=True, slots=True)
class Bags:
    """Ids in bags: bag ``b`` holds ``indices[offsets[b]:offsets[b + 1]]``, the last one the rest.

    Attributes:
        indices: (N,) int64, on the CPU.
        given: (B,) int64 offsets, on the CPU; None if every bag holds exactly one id.
    """

    indices: Tensor
    given: Tensor | None

    @property
    def one_each(self) -> bool:
        """Whether every bag is known to hold exactly one id, so that N equals B."""
        return self.given is None

    @property
    def offsets(self) -> Tensor:
        """Where each bag starts: (B,) int64."""
        return torch.arange(self.num_bags) if self.given is None else self.given

    @property
    def num_bags(self) -> int:
        """B."""
        return self.indices.numel() if self.given is None else self.given.numel()

    def lengths(self) -> Tensor:
        """How many ids each bag holds: (B,) int64."""
        return bag_lengths(self.offsets, self.indices.numel())


@dataclass(frozen=True, slots=True)
class CheckedFeature:
    """One feature's ids, padding taken out, and what is left to do with their rows.

    Attributes:
        bags: the ids.
        weights: (N,) per-sample weights of the ids, on their own device; None for none.
        kept: (N,) positions of the ids among those given; None if none was padding.
        shape: shape of the ids as given, for the rows of a table with mode None.
        jagged: the nested tensor that the ids came as, for a result of the same form; else None.
    """

    bags: Bags
    weights: Tensor | None
    kept: Tensor | None
    shape: tuple[int, ...]
    jagged: Tensor | None


def count_before(mask: Tensor) -> Tensor:
    """How many of a mask's (N,) entries are true before each position, the end too: (N + 1,)."""
    before = torch.zeros(mask.numel() + 1, dtype=torch.int64)
    torch.cumsum(mask, 0, out=before[1:])
    return before


def check(feature: str, spec: RemoteEmbeddingSpec, value: object, where: str) -> CheckedFeature:
    """One feature's ids, checked.

    Args:
        feature: the feature's name, for messages.
        spec: the table that it reads.
        value: see `FeatureValue`. Ids and offsets are int32 or int64, on any device.
        where: who is asking, such as ``"trainer1 (batch of step 17)"``, for messages.

    Raises:
        InputError: if the value has the wrong type, shape or dtype, if an id is out of range, if
            the offsets do not start at 0, decrease, or pass the end, or if weights do not fit.
    """
    what = f"Feature '{feature}' on {where}"
    ids, offsets, weights = _parts(what, value)
    jagged = ids if ids.is_nested else None
    if jagged is not None:
        ids, offsets = _jagged_parts(what, jagged, offsets)
    shape = tuple(ids.shape)
    if offsets is None:
        bags = _flat_bags(what, ids, pooled=spec.mode is not None)
    else:
        bags = _offset_bags(what, ids, offsets)
    _check_range(what, spec, bags.indices)
    if weights is not None:
        weights = _check_weights(what, spec, weights, shape)
    kept = None
    if spec.padding_idx is not None:
        bags, kept = _without(bags, spec.padding_idx)
        weights = weights if weights is None or kept is None else weights[kept.to(weights.device)]
    return CheckedFeature(bags, weights, kept, shape, jagged)


def _parts(what: str, value: object) -> tuple[Tensor, Tensor | None, Tensor | None]:
    parts = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], Tensor):
        kind = type(value).__name__
        raise InputError(
            f"{what} is a {kind}. Give a tensor of ids, or the pair (ids, offsets), or "
            "(ids, offsets, per_sample_weights)."
        )
    ids, offsets, weights = (*parts, None, None)[:3]
    for name, part in (("offsets", offsets), ("per_sample_weights", weights)):
        if part is not None and not isinstance(part, Tensor):
            raise InputError(f"{what}, {name} is a {type(part).__name__}. Give a tensor.")
    return ids, offsets, weights


def _jagged_parts(what: str, jagged: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    if offsets is not None or jagged.layout != torch.jagged or jagged.dim() != 2:
        raise InputError(
            f"{what} is a nested tensor of layout {jagged.layout} and {jagged.dim()} dimensions. "
            "Give one of layout torch.jagged and shape (B, ragged), without offsets."
        )
    if jagged.lengths() is not None:  # type: ignore[attr-defined]
        raise InputError(
            f"{what} is a jagged tensor with holes (by narrow). Pass it as ids.contiguous()."
        )
    return jagged.values(), jagged.offsets()[:-1]  # type: ignore[attr-defined]


def _flat_bags(what: str, ids: Tensor, *, pooled: bool) -> Bags:
    """Bags of ids that came without offsets: a bag a row if the table pools, else one an id."""
    indices = _ids(what, ids, (1, 2) if pooled else range(1, 9))
    num_bags, width = indices.shape[0], 1 if indices.dim() == 1 else indices.shape[1]
    if not pooled:
        num_bags, width = indices.numel(), 1
    if width == 1:
        return Bags(indices.reshape(-1), None)
    return Bags(indices.reshape(-1), torch.arange(num_bags) * width)


def _offset_bags(what: str, ids: Tensor, offsets: Tensor) -> Bags:
    indices = _ids(f"{what}, ids", ids, (1,))
    starts = _ids(f"{what}, offsets", offsets, (1,))
    _check_offsets(what, starts, indices.numel())
    return Bags(indices, starts)


def _ids(what: str, value: Tensor, dims: Collection[int]) -> Tensor:
    if value.dtype not in (torch.int64, torch.int32):
        mend = "Give int64 or int32: ids.long()."
        if value.dtype == torch.bool:
            mend = "Give int64 or int32 ids, not a mask: mask.nonzero() has those that are set."
        raise InputError(f"{what} has dtype {value.dtype}. {mend}")
    if value.is_meta or value.layout != torch.strided:
        raise InputError(
            f"{what} is a tensor on device '{value.device}' of layout {value.layout}. Give a dense "
            "tensor that has values, on the CPU or another device."
        )
    if value.dim() not in dims:
        wanted = " or ".join(f"{n}-D" for n in sorted(dims)[:2])
        raise InputError(f"{what} has shape {tuple(value.shape)}. Give a {wanted} tensor.")
    if value.requires_grad or value.dtype != torch.int64 or value.device.type != "cpu":
        value = value.detach().to("cpu", torch.int64)
    return value.contiguous()


def _check_offsets(what: str, offsets: Tensor, num_indices: int) -> None:
    if are_starts(offsets, num_indices):
        return
    if offsets.numel() == 0:
        raise InputError(
            f"{what} has {num_indices} ids but no offset: no bag holds them. Give "
            "each bag's start; the first is 0."
        )
    if int(offsets[0]) != 0:
        raise InputError(
            f"{what}: offsets start at {int(offsets[0])}. The first must be 0. Offsets are where "
            "each bag starts, not the bags' lengths."
        )
    steps = offsets[1:] - offsets[:-1]
    if steps.numel() and int(steps.min()) < 0:
        bag = int((steps < 0).nonzero()[0]) + 1
        raise InputError(
            f"{what}: offset {int(offsets[bag])} of bag {bag} is below the {int(offsets[bag - 1])} "
            "before it. Offsets are where each bag starts, so they never decrease."
        )
    raise InputError(
        f"{what}: the last offset is {int(offsets[-1])}, past the {num_indices} ids. "
        "Offsets are where each bag starts, not the bags' lengths."
    )


def _check_range(what: str, spec: RemoteEmbeddingSpec, indices: Tensor) -> None:
    if all_below(indices, spec.num_embeddings):
        return
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low < 0:
        raise InputError(
            f"{what} got the negative id {low} for table '{spec.name}'. Ids run from 0 to "
            f"{spec.num_embeddings - 1}: leave missing ones out of their bags, or give them one id "
            "of their own and set padding_idx to it."
        )
    raise InputError(
        f"{what} got id {high}, but num_embeddings of table '{spec.name}' is "
        f"{spec.num_embeddings}. Raise num_embeddings or hash the ids."
    )


def _check_weights(
    what: str, spec: RemoteEmbeddingSpec, weights: Tensor, shape: tuple[int, ...]
) -> Tensor:
    if spec.mode != "sum":
        raise InputError(
            f"{what} got per_sample_weights, but table '{spec.name}' has mode={spec.mode!r}. They "
            "go with mode='sum', as in torch."
        )
    if tuple(weights.shape) != shape or not weights.is_floating_point() or weights.is_meta:
        meta = " without values (meta)" if weights.is_meta else ""
        raise InputError(
            f"{what}: per_sample_weights are {weights.dtype} of shape {tuple(weights.shape)}"
            f"{meta}. Give a float tensor of the ids' shape, {shape}."
        )
    return weights.reshape(-1)


def _without(bags: Bags, padding_idx: int) -> tuple[Bags, Tensor | None]:
    """The bags without an id, and the positions of the ids that stay; None if all do."""
    stays = bags.indices != padding_idx
    kept = stays.nonzero().squeeze(1)
    if kept.numel() == bags.indices.numel():
        return bags, None
    return Bags(bags.indices[kept], count_before(stays)[bags.offsets]), kept
