"""Many steps: nothing grows, nothing trips a limit on a single call."""

from __future__ import annotations

import pytest

import hybridpar as hp
import soaked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_twenty_thousand_steps_hold_the_same_memory(consistency: str) -> None:
    # Far more steps than fit into one such limit, so none of them may span the run.
    launcher = hp.RoleLauncher(hp.Roles(trainers=2, servers=2), timeout_s=20.0, device="cpu")
    for usage in launcher.run(soaked.train, (consistency,)):
        assert usage.steps == 20_000
        for name, (warm, end) in usage.megabytes.items():
            assert abs(end - warm) <= 0.02 * warm, f"{name}: {warm:.1f} MB, then {end:.1f} MB"
        for name, (warm, end) in usage.files.items():
            assert end <= warm + 2, f"{name} has {end} open files, had {warm}"  # two look on
