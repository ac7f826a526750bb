"""The moves of rows, compiled and by torch, against the plainest torch there is."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpar import kernels, optim
from hybridpar.kernels import by_torch, compiled
from hybridpar.kernels.groups import Groups
from hybridpar.server.compiled_rules import compiled_step
from hybridpar.server.rules import rule_for

needs_compiled = pytest.mark.skipif(not compiled.AVAILABLE, reason="was installed without")
each = pytest.mark.parametrize(
    "chosen",
    [by_torch, pytest.param(compiled, marks=needs_compiled)],
    ids=["torch", "compiled"],
)


def test_the_compiled_kernels_are_there_with_a_compiler() -> None:
    """What the gate runs is what users run."""
    if not compiled.AVAILABLE:
        pytest.skip("was installed where there was no C compiler")
    assert kernels.are_compiled()


@each
@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 40), width=st.integers(1, 70), seed=st.integers(0, 99),
    lengths=st.lists(st.integers(0, 5), min_size=0, max_size=60), one_each=st.booleans(),
    parts=st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_add_bags(
    chosen: ModuleType, num_rows: int, width: int, seed: int, lengths: list[int], one_each: bool,
    parts: int,
) -> None:  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([1] * len(lengths) if one_each else lengths, dtype=torch.int64)
    rows = torch.randint(num_rows, (int(sizes.sum()),), generator=draw)
    values = torch.randn(len(sizes), width, generator=draw)
    target = torch.randn(num_rows, width, generator=draw)
    wanted = target.double()
    wanted.index_add_(0, rows, values.double().repeat_interleave(sizes, 0), alpha=-0.3)
    offsets = None if one_each else sizes.cumsum(0) - sizes
    for part in range(parts):
        chosen.add_bags(target, rows, offsets, values, -0.3, part, parts)
    torch.testing.assert_close(target.double(), wanted, rtol=1e-5, atol=1e-5)


@needs_compiled
@pytest.mark.parametrize("width", [1, 7, 16, 64])
@pytest.mark.parametrize("count", [0, 1, 5000])
def test_both_give_the_same_rows(width: int, count: int) -> None:
    source = torch.randn(300, width)
    rows = torch.randint(300, (2 * count,))[::2]  # not contiguous
    assert torch.equal(compiled.gather_rows(source, rows), source[rows])
    assert torch.equal(by_torch.gather_rows(source, rows), source[rows])


@each
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 100, 20_000, 40_000])  # by torch, sorted in three ways
@pytest.mark.parametrize("largest", [300, 2**31 + 5])
def test_grouped(chosen: ModuleType, parts: int, count: int, largest: int) -> None:
    rows = torch.randint(300, (count,)) + largest - 300
    bags = torch.randint(50, (count,))
    found = {}
    part = chosen.grouped(rows, bags, parts)
    for groups in map(part, range(parts)):
        starts = [*groups.starts.tolist(), len(groups.bags)]
        for row, ends in zip(groups.rows.tolist(), itertools.pairwise(starts), strict=True):
            assert row not in found
            found[row] = groups.bags[slice(*ends)].tolist()
    assert found.keys() == set(rows.tolist())
    for row, own in found.items():
        assert own == bags[rows == row].tolist()


RULES = [
    optim.Adagrad(lr=0.3, lr_decay=0.1, weight_decay=0.02),
    optim.RowWiseAdagrad(lr=0.3),
    optim.RowWiseAdagrad(lr=0.3, weight_decay=0.02),
    optim.Adam(lr=0.3, weight_decay=0.02),
    optim.AdamW(lr=0.3, weight_decay=0.2),
    optim.RowWiseAdam(lr=0.3, betas=(0.8, 0.9), weight_decay=0.02),
    optim.Adam(lr=0.3, betas=(0.0, 0.0)),
    optim.RowWiseAdam(lr=0.3, betas=(0.3, 0.9)),
]


@needs_compiled
@pytest.mark.parametrize("width", [1, 12, 64])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_compiled_rule_is_the_rule(rule: optim.SparseOptimizerSettings, width: int) -> None:
    """Three steps of some rows of a table: as by torch, and no other row changes."""
    table = torch.randn(30, width)
    states = {name: torch.zeros(30, own) for name, own in rule.state_widths(width).items()}
    wanted, wanted_states = table.clone(), {name: s.clone() for name, s in states.items()}
    for t in (1, 2, 3):
        rows = torch.randperm(30)[:10]
        ids = rows.repeat_interleave(2)
        grads = torch.randn(20, width)
        step = compiled_step(rule, 0.3, t)
        assert step is not None
        groups = compiled.grouped(ids, None, 1)(0)
        compiled.step_rows(step, table, list(states.values()), groups, grads.split([8, 12]), 0.5)
        own = {name: s[rows] for name, s in wanted_states.items()}
        grad = grads.view(10, 2, width).sum(1) * 0.5
        wanted[rows] += rule_for(rule)(rule, wanted[rows], own, grad, 0.3, t)
        for name, values in own.items():
            wanted_states[name][rows] = values
    torch.testing.assert_close(table, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states, wanted_states, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", [optim.SGD(lr=0.1), optim.FTRL(), optim.Adam(clip_value=1.0)])
def test_rules_that_are_not_compiled(rule: optim.SparseOptimizerSettings) -> None:
    assert compiled_step(rule, 0.1, 1) is None


@needs_compiled
@pytest.mark.parametrize("row", [-1, 4])
def test_a_row_that_is_not_there(row: int) -> None:
    """Is refused before anything is written."""
    table, rows = torch.zeros(4, 2), torch.tensor([0, row])
    with pytest.raises(IndexError, match=f"row {row} of a table of 4 rows"):
        compiled.add_bags(table, rows, None, torch.ones(2, 2), 1.0, 0, 1)
    with pytest.raises(IndexError, match=f"row {row} of a table of 4 rows"):
        compiled.gather_rows(table, rows)
    groups = compiled.grouped(rows, None, 1)(0)
    step = compiled_step(optim.Adagrad(), 0.1, 1)
    assert step is not None
    with pytest.raises(IndexError, match=f"row {row} of a table of 4 rows"):
        compiled.step_rows(step, table, [torch.zeros(4, 2)], groups, [torch.ones(2, 2)], 1.0)
    assert not table.any()


@needs_compiled
def test_values_that_do_not_fit() -> None:
    table = torch.zeros(4, 2)
    with pytest.raises(ValueError, match="for 3 bags of a"):
        compiled.add_bags(table, torch.zeros(3, dtype=torch.int64), None, torch.ones(1, 2), 1, 0, 1)
    step = compiled_step(optim.Adagrad(), 0.1, 1)
    assert step is not None
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(IndexError, match="beyond the 1 gradients"):
        compiled.step_rows(
            step, table, [torch.zeros(4, 2)], Groups(one, one, one + 1), [torch.ones(1, 2)], 1.0
        )


@each
def test_looks_at_ids(chosen: ModuleType) -> None:
    some = torch.tensor([0, 4, 2])
    assert chosen.all_below(some, 5)
    assert not chosen.all_below(some, 4)
    assert not chosen.all_below(some - 1, 5)
    assert chosen.all_below(some[:0], 0)


@each
@pytest.mark.parametrize(
    ("offsets", "count", "fit"),
    [
        ([0, 2, 2, 5], 5, True), ([0, 2], 7, True), ([0, 5], 5, True), ([], 0, True),
        ([0], 0, True), ([], 3, False), ([1, 2], 5, False), ([-1, 2], 5, False),
        ([0, 3, 2], 5, False), ([0, 6], 5, False), ([0, 9, 5], 5, False),
    ],
)  # fmt: skip
def test_are_starts(chosen: ModuleType, offsets: list[int], count: int, fit: bool) -> None:
    assert chosen.are_starts(torch.tensor(offsets, dtype=torch.int64), count) is fit


@each
def test_shifted(chosen: ModuleType) -> None:
    parts = [(torch.arange(6)[::2], 100), (torch.arange(0), 5), (torch.arange(3), 0)]
    assert chosen.shifted(parts).tolist() == [100, 102, 104, 0, 1, 2]
    assert kernels.shifted(parts[-1:]) is parts[-1][0]


@each
def test_bag_numbers(chosen: ModuleType) -> None:
    offsets = torch.tensor([0, 2, 2, 5])
    parts = [(offsets, 6, 4), (None, 2, 2), (offsets[:1], 3, 1), (offsets[:0], 0, 0)]
    assert chosen.bag_numbers(parts).tolist() == [0, 0, 2, 2, 2, 3, 4, 5, 6, 6, 6]


@each
def test_other_defaults_change_nothing(chosen: ModuleType) -> None:
    source, rows = torch.arange(12.0).view(4, 3), torch.tensor([3, 0, 3])
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(chosen.gather_rows(source, rows), source[rows])
        groups = chosen.grouped(rows, None, 1)(0)
        assert sorted(groups.rows.tolist()) == [0, 3]
    finally:
        torch.set_default_dtype(torch.float32)


@each
def test_a_moment_that_forgets(chosen: ModuleType) -> None:
    """beta1 of 0: a large gradient of the past leaves nothing behind."""
    rule = optim.Adam(lr=0.1, betas=(0.0, 0.0))
    table, states = torch.zeros(1, 1), [torch.full((1, 1), 1e5), torch.zeros(1, 1)]
    if chosen is compiled:
        step = compiled_step(rule, 0.1, 2)
        assert step is not None
        groups = compiled.grouped(torch.zeros(1, dtype=torch.int64), None, 1)(0)
        compiled.step_rows(step, table, states, groups, [torch.full((1, 1), 1e-3)], 1.0)
    else:
        named = dict(zip(rule.state_widths(1), states, strict=True))
        table += rule_for(rule)(rule, table, named, torch.full((1, 1), 1e-3), 0.1, 2)
    assert states[0].item() == pytest.approx(1e-3, rel=1e-5)
    assert table.item() == pytest.approx(-0.1, rel=1e-3)


@each
def test_strided_ids(chosen: ModuleType) -> None:
    assert chosen.all_below(torch.tensor([1, 99, 2, 99])[::2], 3)
    assert chosen.are_starts(torch.tensor([0, 99, 2, 99])[::2], 3)
