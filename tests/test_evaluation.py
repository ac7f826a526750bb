"""Evaluation gives the same numbers whatever the number of trainers, and trains nothing."""

from __future__ import annotations

import pytest

import hybridpar as hp
from evaluated import run


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_same_numbers_on_any_number_of_trainers(mode: str) -> None:
    worlds = [
        hp.launch(run, roles=hp.Roles(trainers=trainers, servers=1), args=(mode,), device="cpu")
        for trainers in (1, 2, 3)
    ]
    first, _ = worlds[0][0]
    for world in worlds:
        for found, untouched in world:
            assert untouched
            assert found == world[0][0]
            assert found == pytest.approx(first, rel=1e-6)
