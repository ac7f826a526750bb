"""The dense half's gradients, averaged by DDP or by a server: the same model either way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import averaged as a
import hybridpar as hp


@pytest.mark.parametrize("counts", [[6, 6, 6], [2, 7, 4]], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 2},
        {"clip_grad_norm": 0.1},
        {"clip_grad_value": 0.01},
        {"non_finite": "ignore"},
        {"autocast": torch.bfloat16},
        {"ddp": {"gradient_as_bucket_view": True}},
        {"ddp": {"find_unused_parameters": True}},
        {"ddp": {"static_graph": True}},
        {"ddp": {"bucket_cap_mb": 1}},
        {"stops": True},
        {"sparse_optimizer": None},
    ],
    ids=str,
)
def test_both_averages_are_the_same(options: dict[str, Any], counts: list[int]) -> None:
    if "sparse_optimizer" in options:  # a norm that spans servers is asked for first
        options = {"sparse_optimizer": hp.optim.SGD(lr=0.1, clip_norm=0.05)}
    if "find_unused" in str(options):  # torch 2.13 does not stand two wrappers then
        counts = [6, 6, 6]
    results = hp.launch(a.both, roles=hp.Roles(trainers=3, servers=2), args=(counts, options))
    first = results[0][1]
    for by_ddp, by_server in results:
        torch.testing.assert_close(by_server.rows, by_ddp.rows, atol=1e-6, rtol=1e-5)
        assert by_server.unused == by_ddp.unused == ("find_unused" in str(options))
        for name, value in by_ddp.dense.items():
            torch.testing.assert_close(by_server.dense[name], value, atol=1e-5, rtol=1e-4)
            if "norm.running" not in name:
                assert torch.equal(by_server.dense[name], first.dense[name]), "bit-equal trainers"


@pytest.mark.parametrize(
    ("trainers", "kilobytes", "options", "by_server"),
    [
        (2, 60, {}, True),
        (2, 64, {}, False),  # and BatchNorm with two branches
        (2, 64, {"average_by": "servers"}, True),
        (1, 1, {}, False),
        (1, 1, {"average_by": "servers"}, True),
        (2, 1, {"average_by": "ddp"}, False),
        (2, 1, {"consistency": "async"}, False),
        (2, 1, {"non_finite": "skip"}, False),
        (2, 1, {"grad_scaler": torch.amp.GradScaler("cpu")}, False),
    ],
)
def test_a_server_averages_what_is_small(
    trainers: int, kilobytes: int, options: dict[str, Any], by_server: bool
) -> None:
    found = hp.launch(a.chosen, roles=hp.Roles(trainers=trainers), args=(kilobytes, options))
    assert found == [by_server] * trainers
