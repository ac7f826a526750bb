"""Tables of every kind against plain torch, cut in every way, on two trainers and two servers."""

from __future__ import annotations

import functools

import pytest
import torch

import hybridpar as hp
from scenarios import (
    FILE,
    SCENARIOS,
    Outcome,
    Scenario,
    train_all,
    train_plain,
    train_table,
    weight_of_file,
)

CLOSE = {"atol": 1e-6, "rtol": 1e-6}


@functools.cache
def outcomes() -> list[dict[tuple[str, str], Outcome]]:
    torch.save(weight_of_file(), FILE)
    try:
        return hp.launch(train_all, roles=hp.Roles(trainers=2, servers=2))
    finally:
        FILE.unlink()


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_table_equals_its_plain_twin(scenario: Scenario, sharding: str) -> None:
    if sharding == "column_wise" and "max_norm" in scenario.spec:
        with pytest.raises(hp.WorkerError, match="cannot be sharded column-wise: max_norm"):
            hp.launch(_train_cut, roles=hp.Roles(trainers=1, servers=2), args=(scenario.name,))
        return
    # A half's rounding may fall either way where float32 sums differ in the last bit.
    close = CLOSE if "dtype" not in scenario.spec else {"atol": 2e-2, "rtol": 1e-2}
    losses, rows, top = train_plain(scenario, 2)
    for rank, outcome in enumerate(outcomes()):
        got = outcome[scenario.name, sharding]
        torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(losses[rank]), **close)
        torch.testing.assert_close(got.rows, rows, **close)
        torch.testing.assert_close(got.top, top, **close)


def _train_cut(ctx: hp.TrainerContext, name: str) -> None:
    (scenario,) = [scenario for scenario in SCENARIOS if scenario.name == name]
    train_table(ctx, scenario, "column_wise", hp.optim.SGD())
