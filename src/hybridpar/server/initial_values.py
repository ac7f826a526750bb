"""The values that a table's rows start from: a function of the logical row, not of the servers."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from hybridpar.sharding import SlabPart
from hybridpar.specs import RemoteEmbeddingSpec

# A block is a multiple of 16 values: torch draws normals 16 at a time, so block after block gives
# what one draw over the whole table gives.
_DRAW = 16
_BLOCK_VALUES = 1 << 20


def seed_of(spec: RemoteEmbeddingSpec, model_seed: int) -> int:
    """The seed of a table: its spec's, or one derived from the model's seed and its name."""
    if spec.seed is not None:
        return spec.seed
    digest = hashlib.blake2b(f"{model_seed}/{spec.name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # 63 bits: torch takes a signed seed


def fill(rows: Tensor, spec: RemoteEmbeddingSpec, part: SlabPart, model_seed: int) -> None:
    """Give one shard its initial values.

    Draws the whole table block by block, as one process would, and keeps this shard's rows, so
    that the memory it needs is one block. torch's global generator is left as it was.

    Args:
        rows: (part.num_rows, embedding_dim) float32, filled in place.
        spec: the table.
        part: which of its rows these are.
        model_seed: the seed that tables without a seed of their own derive theirs from.
    """
    init = spec.init or nn.init.normal_
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed_of(spec, model_seed))
        for start, stop in _blocks(spec.num_embeddings, spec.embedding_dim):
            block = torch.empty(stop - start, spec.embedding_dim)
            init(block)
            skip = (part.shard_index - start) % part.num_shards
            mine = block[skip :: part.num_shards]
            first = (start + skip) // part.num_shards
            rows[first : first + len(mine)] = mine


def _blocks(num_rows: int, dim: int) -> list[tuple[int, int]]:
    """Row ranges of about `_BLOCK_VALUES` values, none of them under `_DRAW` unless alone."""
    size = max(_DRAW, _BLOCK_VALUES // dim // _DRAW * _DRAW)
    starts = list(range(0, num_rows, size))
    if len(starts) > 1 and (num_rows - starts[-1]) * dim < _DRAW:
        starts.pop()  # torch draws fewer than 16 values another way: join them to the block before
    return list(zip(starts, [*starts[1:], num_rows], strict=True))
