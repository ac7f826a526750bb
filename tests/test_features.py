"""A feature's ids: brought into bags, or refused with a message that says how to mend it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import hybridpar as hp
from hybridpar.features import check

POOLED = hp.RemoteEmbeddingSpec("t", num_embeddings=10, embedding_dim=4, mode="sum")
MEAN = hp.RemoteEmbeddingSpec("t", num_embeddings=10, embedding_dim=4, mode="mean")
ONE_ID = hp.RemoteEmbeddingSpec("t", num_embeddings=10, embedding_dim=4)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def jagged(*bags: list[int]) -> torch.Tensor:
    return torch.nested.nested_tensor([ids(*bag) for bag in bags], layout=torch.jagged)


@pytest.mark.parametrize(
    ("spec", "value", "message"),
    [
        (POOLED, ids(1, 10), "got id 10, but num_embeddings of table 't' is 10. Raise"),
        (POOLED, ids(-1, 2), "negative id -1 for table 't'"),
        (ONE_ID, torch.tensor([1.0]), r"dtype torch.float32. Give int64 or int32: ids.long\(\)"),
        (ONE_ID, [1, 2], "is a list. Give a tensor of ids"),
        (ONE_ID, torch.tensor(1), r"has shape \(\). Give a 1-D or 2-D tensor"),
        (POOLED, ids(1).reshape(1, 1, 1), r"Give a 1-D or 2-D tensor"),
        (POOLED, (ids(1, 2), ids(1)), "offsets start at 1. The first must be 0"),
        (POOLED, (ids(1, 2, 3), ids(0, 2, 1)), "offset 1 of bag 2 is below the 2 before it"),
        (POOLED, (ids(1, 2), ids(0, 3)), "last offset is 3, past the 2 ids"),
        (POOLED, (ids(1, 2), ids()), "2 ids but no offset"),
        (POOLED, (ids(1, 2), torch.tensor([0.0])), "offsets has dtype torch.float32"),
        (POOLED, (ids(1), ids(0), ids(0), ids(0)), "is a tuple. Give a tensor of ids, or the pair"),
        (POOLED, (ids(1), [0]), "offsets is a list. Give a tensor"),
        (POOLED, (ids(1, 2), None, torch.ones(3)), r"of shape \(3,\). Give a float tensor of"),
        (POOLED, (ids(1, 2), None, ids(1, 2)), "per_sample_weights are torch.int64"),
        (MEAN, (ids(1), None, torch.ones(1)), "mode='mean'. They go with mode='sum'"),
        (POOLED, (jagged([1], [2]), ids(0)), "Give one of layout torch.jagged"),
    ],
)
def test_bad_input_is_refused(spec, value, message: str) -> None:
    with pytest.raises(hp.InputError, match=message) as caught:
        check("f", spec, value, "trainer1 (step 17)")
    assert "Feature 'f' on trainer1 (step 17)" in str(caught.value)


@given(
    lengths=st.lists(st.integers(0, 5), max_size=8),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 9),
)
def test_bags_pool_as_torch_does(lengths: list[int], dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    sizes = torch.tensor(lengths, dtype=torch.int64)
    indices = torch.randint(10, (int(sizes.sum()),)).to(dtype)
    bags = check("f", POOLED, (indices, (sizes.cumsum(0) - sizes).to(dtype)), "here").bags
    assert bags.indices.dtype == bags.offsets.dtype == torch.int64
    assert bags.num_bags == len(lengths)
    assert bags.lengths().tolist() == lengths


@pytest.mark.parametrize("shape", [(0,), (3,), (3, 1), (3, 4), (0, 4), (3, 0)], ids=str)
def test_fixed_lengths(shape: tuple[int, ...]) -> None:
    indices = torch.randint(10, shape)
    bags = check("f", POOLED, indices, "here").bags
    width = 1 if len(shape) == 1 else shape[1]
    assert bags.num_bags == shape[0]
    assert bags.lengths().tolist() == [width] * shape[0]
    weight = torch.randn(10, 4)
    pooled = F.embedding_bag(bags.indices, weight, bags.offsets, mode="sum")
    assert torch.allclose(pooled, weight[indices.reshape(shape[0], width)].sum(1), atol=1e-6)
