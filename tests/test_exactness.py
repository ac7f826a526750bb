"""The core proof: sync mode changes a model as one plain torch process does."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import hybridpar as hp
import reference
from hybridpar.planner import make_plan
from worlds import CASES, SIZES, Case, Trained, all_cases, own_loop, run_loop

STEPS = 20
CLOSE = {"atol": 1e-6, "rtol": 1e-6}


def assert_same(got: Trained, wanted: Trained) -> None:
    torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(wanted.losses), **CLOSE)
    for what in ("rows", "state", "dense"):
        ours, theirs = getattr(got, what), getattr(wanted, what)
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], **CLOSE, msg=f"{what} {name}")


def assert_bit_equal(first: Trained, second: Trained) -> None:
    assert first.losses == second.losses
    for what in ("rows", "state", "dense"):
        for name, value in getattr(first, what).items():
            assert torch.equal(value, getattr(second, what)[name]), (what, name)


@functools.cache
def world(trainers: int, servers: int) -> list[list[Trained]]:
    """Each trainer's result of every case, trained in one world."""
    return hp.launch(all_cases, roles=hp.Roles(trainers=trainers, servers=servers), args=(STEPS,))


@functools.cache
def plain(case: Case, trainers: int) -> list[Trained]:
    return reference.train(case, [STEPS] * trainers)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
@pytest.mark.parametrize(("trainers", "servers"), list(itertools.product((1, 2, 3), repeat=2)))
def test_training_equals_one_plain_process(trainers: int, servers: int, case: Case) -> None:
    results = world(trainers, servers)
    wanted = plain(case._replace(sharding=""), trainers)
    for rank in range(trainers):
        assert_same(results[rank][CASES.index(case)], wanted[rank])


def test_two_runs_are_bit_equal() -> None:
    again = hp.launch(all_cases, roles={"trainer": 3, "ps": 2}, args=(STEPS,))
    for before, after in zip(world(3, 2), again, strict=True):
        for first, second in zip(before, after, strict=True):
            assert_bit_equal(first, second)


@pytest.mark.parametrize(
    "case", [CASES[0], CASES[-1], CASES[4]], ids=lambda c: "-".join(map(str, c))
)
def test_own_loop_equals_plain(case: Case) -> None:
    results = hp.launch(own_loop, roles={"trainer": 2, "ps": 2}, args=(case, STEPS))
    for got, wanted in zip(results, reference.train(case, [STEPS] * 2), strict=True):
        assert_same(got, wanted)


@pytest.mark.parametrize("steps", [[4, 7, 2], [0, 3, 3], [5, 0, 0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[14]], ids=lambda c: "-".join(map(str, c)))
def test_uneven_batches_average_over_who_has_data(case: Case, steps: list[int]) -> None:
    results = hp.launch(run_loop, roles={"trainer": 3, "ps": 2}, args=(case, steps, 2))
    wanted = reference.train(case, steps, epochs=2)
    for got, expected in zip(results, wanted, strict=True):
        assert_same(got, expected)


def test_every_table_is_spread_or_whole_as_pinned() -> None:
    """The cases above would prove little if row-wise tables stayed on one server."""
    specs = [
        hp.RemoteEmbeddingSpec(
            name,
            num_embeddings=rows,
            embedding_dim=dim,
            sharding="row_wise",
            optimizer=hp.optim.SGD(),
        )
        for name, (rows, dim) in SIZES.items()
    ]
    plan = make_plan(specs, 3)
    assert all(len(placement.shards) == 3 for placement in plan.placements.values())
