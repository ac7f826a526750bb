"""`fit(profile=True)`: where a step's time goes."""

from __future__ import annotations

import pytest

import hybridpar as hp
from profiled import train


@pytest.mark.parametrize("consistency", ["sync", "async"])
@pytest.mark.parametrize("trainers", [1, 2])
def test_a_profile_adds_up(trainers: int, consistency: str) -> None:
    results = hp.launch(train, roles=hp.Roles(trainers=trainers, servers=2), args=(consistency,))
    for rank, (result, printed) in enumerate(results):
        assert result.profile is not None
        profile = result.profile
        assert profile.steps == result.steps == 30
        taken = sum(profile.trainer.values())
        assert 0.8 * profile.seconds < taken <= profile.seconds
        assert all(value >= 0 for value in profile.trainer.values())
        assert (profile.all_reduce > 0) == (trainers > 1)
        assert profile.servers.keys() == {"ps0", "ps1"}
        for phases in profile.servers.values():
            assert 0 < phases["update"] < profile.seconds * trainers
            assert ("queue" in phases) == (consistency == "sync")
        assert printed == ("" if rank else f"{profile}\n"), "trainer 0 alone prints it"
    for word in ("ms a step, mean of 30", "wait for servers", "all-reduce", "ps1 update"):
        assert word in str(results[-1][0].profile)
