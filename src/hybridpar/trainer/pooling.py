"""Which part of pooling the servers do, and the rest of it, done here.

A sum of rows is the same whoever adds: the servers sum each bag, and one row a bag travels. What is
not a plain sum (max, per-sample weights, no pooling at all) needs every id's row on the trainer.

Shapes: N ids, B bags, D columns.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridpar.features import Bags, CheckedFeature
from hybridpar.specs import RemoteEmbeddingSpec


def is_pooled_by_servers(spec: RemoteEmbeddingSpec, feature: CheckedFeature) -> bool:
    """Whether one row a bag comes from the servers, not one an id."""
    return spec.mode in ("sum", "mean") and feature.weights is None


def asked_of_servers(spec: RemoteEmbeddingSpec, feature: CheckedFeature) -> Bags:
    """The bags whose sums the servers are asked for: the feature's own, or a bag for each id."""
    bags = feature.bags
    if is_pooled_by_servers(spec, feature) or bags.one_each:
        return bags
    return Bags(bags.indices, None)


def finish(spec: RemoteEmbeddingSpec, feature: CheckedFeature, rows: Tensor) -> Tensor:
    """The embedding of a feature from what the servers sent, differentiable in it.

    Args:
        spec: the table.
        feature: the ids.
        rows: a row for each bag of :func:`asked_of_servers`, on the trainer's device.

    Returns:
        (B, D) if pooled; else a row for each id given: (N, D), (B, L, D) or jagged (B, ragged, D).
    """
    if spec.mode is None:
        return _unpooled(feature, rows)
    bags = feature.bags
    if is_pooled_by_servers(spec, feature):
        if spec.mode == "mean" and not bags.one_each:
            return rows / bags.lengths().clamp_(min=1).unsqueeze(1).to(rows.device)
        return rows
    if bags.indices.numel() == 0:
        return rows.new_zeros(bags.num_bags, spec.embedding_dim)
    positions = torch.arange(rows.shape[0], device=rows.device)
    weights = None if feature.weights is None else feature.weights.to(rows.device, rows.dtype)
    return F.embedding_bag(
        positions, rows, bags.offsets.to(rows.device), mode=spec.mode, per_sample_weights=weights
    )


def _unpooled(feature: CheckedFeature, rows: Tensor) -> Tensor:
    """Every id's row in the form that the ids came in; a padding id's row is zero."""
    if feature.kept is not None:
        full = rows.new_zeros(math.prod(feature.shape), rows.shape[1])
        rows = full.index_copy(0, feature.kept.to(rows.device), rows)
    if feature.jagged is not None:
        offsets = feature.jagged.offsets().to(rows.device)  # type: ignore[attr-defined]
        return torch.nested.nested_tensor_from_jagged(rows, offsets)
    return rows.reshape(*feature.shape, rows.shape[1])
