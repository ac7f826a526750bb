"""The values that a table's rows start from: a function of the logical row, not of the servers."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hybridpar.errors import SpecError, describe
from hybridpar.sharding import SlabPart
from hybridpar.specs import RemoteEmbeddingSpec

# A block is a multiple of 16 values: torch draws normals 16 at a time, so block after block gives
# what one draw over the whole table gives.
_DRAW = 16
_BLOCK_VALUES = 1 << 17


def seed_from(*parts: object) -> int:
    """A seed that depends on all parts, the same in every process."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # 63 bits: torch takes a signed seed


@contextmanager
def seeded(spec: RemoteEmbeddingSpec, model_seed: str) -> Iterator[None]:
    """Within it torch's global generator is seeded for a spec; after it, it is as it was.

    The seed is the spec's own, or one derived from the model's seed and the spec's name.
    """
    seed = seed_from(model_seed, spec.name) if spec.seed is None else spec.seed
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def fill(rows: Tensor, spec: RemoteEmbeddingSpec, part: SlabPart, model_seed: str) -> None:
    """Give one shard its initial values.

    Goes through the whole table block by block, as one process would, and keeps this shard's
    values, so that the memory it needs is one block.

    Args:
        rows: (part.num_rows, columns of the shard), filled in place.
        spec: the table.
        part: which of its rows and columns these are.
        model_seed: the seed that tables without a seed of their own derive theirs from.

    Raises:
        SpecError: if a file of values has the wrong shape.
    """
    columns = slice(part.first_column, part.first_column + rows.shape[1])
    with torch.no_grad(), seeded(spec, model_seed):
        for start, block in _blocks(spec):
            skip = (part.row_shard - start) % part.num_row_shards
            mine = block[skip :: part.num_row_shards, columns]
            first = (start + skip) // part.num_row_shards
            rows[first : first + len(mine)] = mine
        if spec.padding_idx is not None:
            local, shard = divmod(spec.padding_idx, part.num_row_shards)
            if shard == part.row_shard:
                rows[local] = 0.0


def _blocks(spec: RemoteEmbeddingSpec) -> Iterator[tuple[int, Tensor]]:
    """The table's values, block after block of whole rows, each with its first row."""
    if spec.init is None or callable(spec.init):
        init = spec.init or nn.init.normal_
        _check_blockwise(spec, init)
        for start, stop in _ranges(spec.num_embeddings, spec.embedding_dim):
            block = torch.empty(stop - start, spec.embedding_dim)
            init(block)
            yield start, block
        return
    values = spec.init if isinstance(spec.init, Tensor) else _loaded(spec.name, spec.init)
    shape = (spec.num_embeddings, spec.embedding_dim)
    if not isinstance(values, Tensor) or tuple(values.shape) != shape:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise SpecError(
            f"Table '{spec.name}': the file {spec.init} holds {got}. Save one tensor of shape "
            f"{shape} in it, with torch.save."
        )
    for start, stop in _ranges(spec.num_embeddings, spec.embedding_dim):
        yield start, values[start:stop]


def _loaded(table: str, path: str | os.PathLike[str]) -> object:
    try:
        return torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except Exception as error:
        raise SpecError(
            f"Table '{table}': a server cannot read init, the file {path}: {describe(error)}. Save "
            "a tensor there with torch.save, where every server can read it."
        ) from error


def _check_blockwise(spec: RemoteEmbeddingSpec, init: object) -> None:
    """Refuse torch's initialisers that look at the whole table's shape, if it comes in blocks."""
    function = init.func if isinstance(init, functools.partial) else init
    name = getattr(function, "__name__", "")
    by_shape = name.startswith(("xavier_", "kaiming_", "orthogonal_", "dirac_", "eye_", "sparse_"))
    if by_shape and len(_ranges(spec.num_embeddings, spec.embedding_dim)) > 1:
        raise SpecError(
            f"Table '{spec.name}' cannot be filled by {name}: it depends on the shape of the whole "
            "table, which is filled in blocks of rows. Use uniform_ or normal_ with the bound or "
            "std that it would take, or give the values as a file."
        )


def _ranges(num_rows: int, dim: int) -> list[tuple[int, int]]:
    """Row ranges of about `_BLOCK_VALUES` values, none of them under `_DRAW` unless alone."""
    size = max(_DRAW, _BLOCK_VALUES // dim // _DRAW * _DRAW)
    starts = list(range(0, num_rows, size))
    if len(starts) > 1 and (num_rows - starts[-1]) * dim < _DRAW:
        starts.pop()  # torch draws fewer than 16 values another way: join them to the block before
    return list(zip(starts, [*starts[1:], num_rows], strict=True))
