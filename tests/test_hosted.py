"""Modules on servers against the same modules in one plain torch process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hosted
import hybridpar as hp
from scenarios import DIM

CLOSE = {"atol": 1e-6, "rtol": 1e-5}


@pytest.mark.parametrize("by_hand", [False, True], ids=["loop", "by hand"])
@pytest.mark.parametrize(("trainers", "servers"), [(1, 1), (2, 3), (3, 2)])
def test_hosted_modules_train_as_plain_ones(trainers: int, servers: int, by_hand: bool) -> None:
    if by_hand and trainers == 1:
        by_hand = False  # DDP is for several
    roles = hp.Roles(trainers=trainers, servers=servers)
    wanted = hosted.train_plain(trainers)
    for outcome in hp.launch(hosted.train, roles=roles, args=(by_hand, "sync")):
        torch.testing.assert_close(outcome.rows, wanted.rows, **CLOSE)
        torch.testing.assert_close(outcome.top, wanted.top, **CLOSE)
        for name, state in wanted.states.items():
            assert outcome.states[name].keys() == state.keys()
            for key, value in state.items():
                torch.testing.assert_close(outcome.states[name][key], value, **CLOSE)


def test_hosted_modules_train_on_arrival() -> None:
    first, second = hp.launch(hosted.train, roles=hp.Roles(trainers=2), args=(False, "async"))
    fresh = hosted.QuotientRemainder(1, 1, 1)
    assert first.states["qr"].keys() == fresh.state_dict().keys()
    assert torch.equal(first.top, second.top)


def test_training_and_eval_mode_reach_the_module() -> None:
    assert hp.launch(hosted.modes, roles=hp.Roles(trainers=1)) == [(False, True, False)]


def test_a_scheduler_drives_the_modules_optimizer() -> None:
    for first, second in hp.launch(hosted.schedule, roles=hp.Roles(trainers=2)):
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("options", "value", "message"),
    [
        ({"module": hosted.not_a_module}, torch.ones(1), "Module 'm' was built as a str"),
        ({"optimizer": hosted.no_optimizer}, torch.ones(1), "built as 'no optimizer'. Give"),
        ({"args": (5, DIM, 1, 2, 3, 4)}, torch.ones(1), r"ps0 .*TypeError"),
        ({"module": hosted.returns_a_pair, "args": ()}, torch.ones(2, 5), "returned a tuple"),
        ({}, [1.0], "has a list among the inputs of module 'm'"),
        ({}, torch.ones(2, 4), r"ps0 .*RuntimeError: mat1 and mat2"),
        (
            {"optimizer": hp.optim.SGD(lr=0.1)},
            torch.ones(1),
            "Give a module a function of its parameters",
        ),
        ({"optimizer": None}, torch.ones(1), "Give a module a function of its parameters"),
        ({"num_embeddings": 3}, torch.ones(1), "num_embeddings=3. Give it to the module itself"),
    ],
    ids=range(9),
)
def test_modules_that_cannot_be_hosted(options: dict[str, Any], value: Any, message: str) -> None:
    with pytest.raises(hp.WorkerError, match=message):
        hp.launch(hosted.use_one, roles=hp.Roles(trainers=1), args=(options, value))


def test_an_input_that_wants_a_gradient_is_refused() -> None:
    with pytest.raises(hp.WorkerError, match=r"Pass input.detach\(\)"):
        hp.launch(hosted.learned_input, roles=hp.Roles(trainers=1))


def test_a_lambda_is_refused_before_it_is_sent() -> None:
    with pytest.raises(hp.WorkerError, match=r"'m' has module=.*cannot be sent to a server"):
        hp.launch(local_module, roles=hp.Roles(trainers=1))


def local_module(ctx: hp.TrainerContext) -> None:
    hosted.use_one(ctx, {"module": lambda: nn.Linear(5, DIM), "args": ()}, torch.ones(1))
