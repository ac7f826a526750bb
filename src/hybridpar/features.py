"""The ids of one feature of one batch, checked on the trainer and brought into one form: bags.

Shapes: N ids, B bags, L ids a bag where every bag has the same length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from hybridpar.errors import InputError
from hybridpar.specs import RemoteEmbeddingSpec

FeatureValue: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""What ``sparse_inputs`` gives for a feature: ``ids`` (N,) or (B, L), or ``(ids, offsets)``."""


@dataclass(frozen=True, slots=True)
class Bags:
    """Ids in bags: bag ``b`` holds ``indices[offsets[b]:offsets[b + 1]]``, the last one the rest.

    Attributes:
        indices: (N,) int64, on the CPU.
        offsets: (B,) int64, on the CPU.
        one_each: whether every bag holds exactly one id, so that N equals B.
    """

    indices: Tensor
    offsets: Tensor
    one_each: bool

    @property
    def num_bags(self) -> int:
        """B."""
        return self.offsets.numel()

    def lengths(self) -> Tensor:
        """How many ids each bag holds: (B,) int64."""
        return bag_lengths(self.offsets, self.indices.numel())


def bag_lengths(offsets: Tensor, num_indices: int) -> Tensor:
    """How many ids each bag holds, from the (B,) start offsets and N: (B,) int64."""
    ends = torch.empty_like(offsets)
    if offsets.numel():
        ends[:-1] = offsets[1:]
        ends[-1] = num_indices
    return ends.sub_(offsets)


def to_bags(feature: str, spec: RemoteEmbeddingSpec, value: object, where: str) -> Bags:
    """One feature's ids as checked bags.

    Args:
        feature: the feature's name, for messages.
        spec: the table that it reads.
        value: ``ids`` of shape (N,), one id a sample; ``ids`` of shape (B, L), L ids a bag; or the
            pair ``(ids (N,), offsets (B,))``, as :class:`torch.nn.EmbeddingBag` takes it. int32 or
            int64, on any device.
        where: who is asking, such as ``"trainer1 (step 17)"``, for messages.

    Raises:
        InputError: if the value has the wrong type, shape or dtype, if an id is out of range, or
            if the offsets do not start at 0, decrease, or pass the end.
    """
    what = f"Feature '{feature}' on {where}"
    if isinstance(value, tuple) and len(value) == 2:
        indices = _ids(f"{what}, ids", value[0], (1,))
        offsets = _ids(f"{what}, offsets", value[1], (1,))
        if spec.mode is None:
            raise InputError(
                f"{what} got (ids, offsets), but table '{spec.name}' has mode=None, which gives a "
                "row for each id. Pass ids alone, or set mode='sum' or 'mean'."
            )
        _check_offsets(what, offsets, indices.numel())
        one_each = False
    else:
        indices = _ids(what, value, (1,) if spec.mode is None else (1, 2))
        width = 1 if indices.dim() == 1 else indices.shape[1]
        num_bags = indices.shape[0]
        one_each = width == 1
        offsets = torch.arange(0, num_bags * width, width) if width else torch.zeros(num_bags)
        indices, offsets = indices.reshape(-1), offsets.long()
    _check_range(what, spec, indices)
    return Bags(indices, offsets, one_each)


def _ids(what: str, value: object, dims: tuple[int, ...]) -> Tensor:
    if not isinstance(value, Tensor):
        raise InputError(
            f"{what} is a {type(value).__name__}. Give a tensor of ids, or the pair "
            "(ids, offsets) of tensors."
        )
    if value.dtype not in (torch.int64, torch.int32):
        raise InputError(f"{what} has dtype {value.dtype}. Give int64 or int32: ids.long().")
    if value.dim() not in dims:
        wanted = " or ".join(f"{n}-D" for n in dims)
        raise InputError(f"{what} has shape {tuple(value.shape)}. Give a {wanted} tensor.")
    return value.detach().to("cpu", torch.int64).contiguous()


def _check_offsets(what: str, offsets: Tensor, num_indices: int) -> None:
    if offsets.numel() == 0:
        if num_indices:
            raise InputError(f"{what} has {num_indices} ids but no offset: no bag holds them.")
        return
    if int(offsets[0]) != 0:
        raise InputError(f"{what}: offsets start at {int(offsets[0])}. The first must be 0.")
    steps = offsets[1:] - offsets[:-1]
    if steps.numel() and int(steps.min()) < 0:
        bag = int((steps < 0).nonzero()[0]) + 1
        raise InputError(
            f"{what}: offset {int(offsets[bag])} of bag {bag} is below the {int(offsets[bag - 1])} "
            "before it. Offsets are where each bag starts, so they never decrease."
        )
    if int(offsets[-1]) > num_indices:
        raise InputError(
            f"{what}: the last offset is {int(offsets[-1])}, past the {num_indices} ids. "
            "Offsets are where each bag starts, not the bags' lengths."
        )


def _check_range(what: str, spec: RemoteEmbeddingSpec, indices: Tensor) -> None:
    if indices.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low < 0:
        raise InputError(f"{what} got the negative id {low} for table '{spec.name}'.")
    if high >= spec.num_embeddings:
        raise InputError(
            f"{what} got id {high}, but num_embeddings of table '{spec.name}' is "
            f"{spec.num_embeddings}. Raise num_embeddings or hash the ids."
        )
