"""The server's parts without processes: initial values, update rules, slabs."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hybridpar as hp
from hybridpar.messages import SlabLookup, SlabPush
from hybridpar.server import initial_values
from hybridpar.server.gradients import BagGradients, by_row
from hybridpar.server.lanes import Lanes
from hybridpar.server.slab import Slab
from hybridpar.sharding import SlabKind, SlabLayout, SlabPart


def filled(spec: hp.RemoteEmbeddingSpec, shards: int, seed: str = "0") -> torch.Tensor:
    """The whole table, filled shard by shard and put together."""
    table = torch.full((spec.num_embeddings, spec.embedding_dim), float("nan"))
    for index in range(shards):
        num_rows = len(range(index, spec.num_embeddings, shards))
        rows = torch.empty(num_rows, spec.embedding_dim)
        initial_values.fill(rows, spec, SlabPart("t", index, shards, 0, 0, num_rows), seed)
        table[index::shards] = rows
    return table


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 200), dim=st.integers(1, 9), shards=st.integers(1, 4),
    block=st.sampled_from([16, 64, 1 << 20]),
)  # fmt: skip
def test_initial_values_are_torchs_own(rows: int, dim: int, shards: int, block: int) -> None:
    spec = hp.RemoteEmbeddingSpec("t", num_embeddings=rows, embedding_dim=dim, seed=3)
    before = torch.random.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial_values, "_BLOCK_VALUES", block)
        table = filled(spec, min(shards, rows))
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(3)
    assert torch.equal(table, nn.EmbeddingBag(rows, dim).weight)


def test_a_users_initialiser_and_a_derived_seed() -> None:
    init = functools.partial(nn.init.uniform_, a=2.0, b=3.0)
    spec = hp.RemoteEmbeddingSpec("t", num_embeddings=9, embedding_dim=2, init=init)
    other = hp.RemoteEmbeddingSpec("u", num_embeddings=9, embedding_dim=2, init=init)
    table = filled(spec, 2, seed="1")
    assert bool(((table >= 2) & (table <= 3)).all())
    assert torch.equal(table, filled(spec, 3, seed="1"))
    assert not torch.equal(table, filled(spec, 2, seed="2"))
    assert not torch.equal(table, filled(other, 2, seed="1"))


def slab(rows: int, dim: int, optimizer: hp.optim.SparseOptimizerSettings) -> Slab:
    spec = hp.RemoteEmbeddingSpec("t", num_embeddings=rows, embedding_dim=dim, seed=3)
    kind = SlabKind(dim, torch.float32, optimizer, None, 2.0, "")
    return Slab(SlabLayout(kind, (SlabPart("t", 0, 1, 0, 0, rows),)), {"t": spec}, "0")


@pytest.mark.parametrize("dim", [4, 40])
@pytest.mark.parametrize("bags", [True, False])
@pytest.mark.parametrize(
    "optimizer", [hp.optim.SGD(lr=0.5), hp.optim.Adagrad(lr=0.5, initial_accumulator_value=0.1)]
)
def test_one_update_equals_torchs(dim: int, bags: bool, optimizer) -> None:
    """Two pushes with repeats; only touched rows change."""
    table = slab(20, dim, optimizer)
    weight = nn.Parameter(table.weight.clone())
    torch.manual_seed(0)
    pushes, loss = [], torch.zeros(())
    for _ in range(2):
        indices = torch.randint(10, (12,))
        offsets = torch.tensor([0, 5, 5, 11]) if bags else torch.arange(12)
        grads = torch.randn(len(offsets), dim)
        pushes.append(SlabPush(SlabLookup(indices, offsets if bags else None), grads))
        pooled = nn.functional.embedding_bag(indices, weight, offsets, mode="sum")
        loss = loss + (pooled * grads).sum() / 2
    loss.backward()
    torch_optimizer = (
        torch.optim.SGD([weight], lr=0.5)
        if isinstance(optimizer, hp.optim.SGD)
        else torch.optim.Adagrad([weight], lr=0.5, initial_accumulator_value=0.1)
    )
    torch_optimizer.step()
    before = table.weight.clone()
    table.apply(pushes, lr=0.5, divisor=2, t=1)
    torch.testing.assert_close(table.weight, weight.detach(), atol=1e-6, rtol=1e-6)
    assert torch.equal(table.weight[10:], before[10:])
    if "sum" in table.state:
        wanted = torch_optimizer.state[weight]["sum"]
        torch.testing.assert_close(table.state["sum"], wanted, atol=1e-6, rtol=1e-6)


def test_an_update_of_nothing() -> None:
    table = slab(4, 2, hp.optim.Adagrad())
    before = table.weight.clone()
    empty = SlabLookup(torch.empty(0, dtype=torch.int64), torch.tensor([0, 0]))
    table.apply([SlabPush(empty, torch.ones(2, 2))], lr=0.1, divisor=1, t=1)
    assert torch.equal(table.weight, before)
    assert table.lookup(empty).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("dim", [4, 64])  # narrow, and so wide that it goes bit by bit
@pytest.mark.parametrize("one_each", [True, False])
@pytest.mark.parametrize(
    "optimizer",
    [hp.optim.SGD(lr=0.5), hp.optim.SGD(lr=0.5, momentum=0.9), hp.optim.RowWiseAdagrad(lr=0.5)],
    ids=str,
)
def test_an_update_split_over_threads_is_the_same(dim: int, one_each: bool, optimizer) -> None:
    """To the last bit: a row's gradients are summed in their order, on one thread."""
    torch.manual_seed(0)
    indices = torch.randint(300, (20_000,))
    offsets = None if one_each else torch.arange(0, 20_000, 5)
    grads = torch.randn(20_000 if one_each else 4_000, dim)
    lanes = Lanes(8)
    lanes._most = 4  # however many cores there are
    weights = []
    for own in (Lanes(), lanes):
        table = slab(300, dim, optimizer)
        for t in (1, 2):
            push = SlabPush(SlabLookup(indices, offsets), grads.clone())
            table.apply([push, push], lr=0.5, divisor=2, t=t, lanes=own)
        weights.append((table.weight, *table.state.values()))
    lanes._pool.shutdown()
    for whole, split in zip(*weights, strict=True):
        assert torch.equal(whole, split)


def test_an_error_on_another_thread_is_raised_here() -> None:
    lanes = Lanes(2)

    def fail(number: int) -> None:
        if number == 1:
            raise ArithmeticError("in the other lane")

    with pytest.raises(ArithmeticError, match="in the other lane"):
        lanes.run(fail, 2)
    lanes._pool.shutdown()


@pytest.mark.parametrize("ids", [100, 20_000, 40_000])  # sorted in three ways
@pytest.mark.parametrize("largest", [300, 2**31 + 5])
def test_gradients_by_row(ids: int, largest: int) -> None:
    indices = torch.randint(300, (ids,)) + largest - 300
    gradients = [BagGradients(indices[: ids // 2], None, torch.randn(ids // 2, 3))]
    gradients.append(BagGradients(indices[ids // 2 :], None, torch.randn(ids - ids // 2, 3)))
    part = by_row(gradients, 2)
    got = [pair for number in range(2) for pair in part(number).sums()]
    rows, sums = (torch.cat(each) for each in zip(*got, strict=True))
    rows, order = rows.sort()
    sums = sums[order]
    distinct, inverse = indices.unique(return_inverse=True)
    wanted = torch.zeros(len(distinct), 3, dtype=torch.float64)
    wanted.index_add_(0, inverse, torch.cat([each.grads for each in gradients]).double())
    assert torch.equal(rows, distinct)
    torch.testing.assert_close(sums.double(), wanted, rtol=1e-4, atol=1e-4)
