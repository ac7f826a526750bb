"""What once went wrong: lost updates, hangs, silent differences, errors that misled."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
import torch
from torch import nn

import hybridpar as hp
import regressions as r
from hybridpar import optim
from hybridpar.features import check
from hybridpar.server.rules import ftrl

WORLD = hp.Roles(trainers=2, servers=2)


def test_pushes_under_way_outlive_their_trainer() -> None:
    total, _ = hp.launch(r.push_and_return, roles=hp.Roles(trainers=2))
    assert total == -3.0 * 10_000 * 64


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_batches_larger_than_any_buffer(consistency: str, accumulate: int) -> None:
    launcher = hp.RoleLauncher(hp.Roles(trainers=1), timeout_s=20.0)
    assert launcher.run(r.much_both_ways, (consistency, accumulate)) == [4 // accumulate]


@pytest.mark.parametrize(
    "options",
    [
        {"sparse_optimizer": optim.SGD(lr=0.2, clip_norm=0.3)},
        {"scaled": True},
        {"hooked": True},
        {"scheduled": True},
        {"scheduled": True, "consistency": "async"},
    ],
    ids=["clip_norm", "grad_scaler", "comm_hook", "schedulers", "async"],
)
def test_trainers_agree_after_uneven_epochs(options: dict[str, Any]) -> None:
    launcher = hp.RoleLauncher(hp.Roles(trainers=3, servers=2), timeout_s=20.0)
    (first, rates), *others = launcher.run(r.two_uneven_epochs, (options,))
    for top, other_rates in others:
        assert torch.equal(first, top)
        assert rates == other_rates
    if "scaled" in options:
        assert rates[0] == 1024.0 * 2**4  # eight steps, doubled every two
    if "scheduled" in options:
        assert rates[1:] == [0.05, 0.05]


@pytest.mark.parametrize("staleness", [0, 1])
def test_bounded_fits_and_steps_by_hand_mix(staleness: int) -> None:
    launcher = hp.RoleLauncher(WORLD, timeout_s=20.0)
    for total, met in launcher.run(r.mixed_loops, (staleness,)):
        assert total == 2 * 9 * (6 + 5 + 5 + 20)
        assert max(met) <= staleness


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_a_trainer_without_data_may_wait_longer_than_a_step(consistency: str) -> None:
    launcher = hp.RoleLauncher(hp.Roles(trainers=2), timeout_s=1.5)
    assert launcher.run(r.long_tail, (consistency,)) == [12, 1]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("cycle", "KeyError: 'around'"),
        ("gloo", "RuntimeError: cannot open gloo_features.pt"),
        ("silent", r"CannotSayError \(whose message cannot be shown\)"),
    ],
)
def test_odd_exceptions_are_named(how: str, words: str) -> None:
    with pytest.raises(hp.WorkerError, match=rf"trainer1 .*{words}") as caught:
        hp.launch(r.go_wrong, roles=hp.Roles(trainers=3), args=(how,))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.rank == 1


def test_a_servers_failure_is_named_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(hp.WorkerError, match=r"ps0 .*ArithmeticError: on the server"):
        hp.launch(r.server_fails_while_others_work, roles=hp.Roles(trainers=2))
    assert time.monotonic() - started < 15


def test_graphs_of_unused_outputs_are_dropped() -> None:
    (alive,) = hp.launch(r.many_unused_graphs, roles=hp.Roles(trainers=1))
    assert alive <= 4


def test_what_a_hosted_module_draws_repeats_itself() -> None:
    first, second = (hp.launch(r.draws, roles=hp.Roles(trainers=3)) for _ in range(2))
    for before, after in zip(first, second, strict=True):
        assert torch.equal(before, after)
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
def test_embeddings_may_be_changed_in_place(sharding: str) -> None:
    (rows,) = hp.launch(r.changed_in_place, roles=hp.Roles(trainers=1, servers=2), args=(sharding,))
    assert rows.tolist() == [1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (r.shadow, "Shadowing.plan would hide what HybridModel itself calls 'plan'"),
        (r.restless_inputs, "other ids when called again for the same batch"),
        (r.xavier, "cannot be filled by xavier_uniform_: it depends on the shape"),
    ],
)
def test_what_is_refused(train, message: str) -> None:
    with pytest.raises(hp.WorkerError, match=message):
        hp.launch(train, roles=hp.Roles(trainers=1))


def test_a_fit_that_was_cut_short_leaves_no_gradient() -> None:
    assert hp.launch(r.cut_short, roles=hp.Roles(trainers=1))[0].tolist() == [0, -1, 0, 0]


def test_models_do_not_share_tables_and_can_be_freed() -> None:
    assert hp.launch(r.two_models, roles=WORLD) == [(True, True)] * 2


def test_schedulers_step_in_the_loop() -> None:
    for rows in hp.launch(r.scheduled, roles=WORLD):
        assert rows[1].item() == pytest.approx(-1.11)


def test_features_share_a_table() -> None:
    """Also where a batch has only some of them: (1, 2) gives x and y, (0, 3) only y."""
    for rows in hp.launch(r.shared_table, roles=WORLD):
        assert rows.tolist() == [0.0, -2.0, -3.0, -2.0, -1.0]


def test_hosted_modules_learn_on_arrival() -> None:
    for change in hp.launch(r.hosted_async, roles=hp.Roles(trainers=2)):
        # 2 trainers, 4 steps, 3 samples each, halved, at SGD's default rate
        assert change.item() == pytest.approx(-2 * 4 * 3 / 2 * 1e-3, rel=1e-4)


def test_an_unknown_state_is_refused_and_ends_nothing() -> None:
    (message,) = hp.launch(r.unknown_state, roles=hp.Roles(trainers=1, servers=2))
    assert message == "Table 't' keeps no state 'sum'. Adam keeps exp_avg, exp_avg_sq."


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_every_lookups_staleness_is_counted(consistency: str) -> None:
    assert hp.launch(r.counted_lookups, roles=WORLD, args=(consistency,)) == [6, 6]


def test_jagged_ids_with_holes_are_refused() -> None:
    narrowed = torch.nested.narrow(
        torch.arange(12).reshape(3, 4), 1, torch.tensor([0, 1, 0]), torch.tensor([2, 3, 1]),
        layout=torch.jagged,
    )  # fmt: skip
    spec = hp.RemoteEmbeddingSpec("t", num_embeddings=20, embedding_dim=2, mode="sum")
    with pytest.raises(hp.InputError, match="with holes"):
        check("f", spec, narrowed, "here")


def test_ftrl_at_a_schedules_end() -> None:
    state = {"z": torch.ones(2, 3), "n": torch.ones(2, 3)}
    change = ftrl(optim.FTRL(), torch.ones(2, 3), state, torch.ones(2, 3), 0.0, 1)
    assert change.tolist() == torch.zeros(2, 3).tolist()


@pytest.mark.parametrize("settings", [optim.Adagrad(lr=0.1), optim.Adam(lr=0.1)], ids=str)
def test_half_storage_keeps_float32_state(settings) -> None:
    from hybridpar.messages import SlabLookup, SlabPush
    from hybridpar.server.slab import Slab
    from hybridpar.sharding import SlabKind, SlabLayout, SlabPart
    from test_rules import DIM, ROWS, batches

    spec = hp.RemoteEmbeddingSpec("t", num_embeddings=ROWS, embedding_dim=DIM, seed=3)
    slabs = []
    for dtype in (torch.float32, torch.bfloat16):
        kind = SlabKind(DIM, dtype, settings, None, 2.0, "")
        slabs.append(Slab(SlabLayout(kind, (SlabPart("t", 0, 1, 0, 0, ROWS),)), {"t": spec}, "0"))
    for t, (ids, grads) in enumerate(batches(few=True), start=1):
        for slab in slabs:
            slab.apply([SlabPush(SlabLookup(ids, None), grads)], lr=0.1, divisor=1, t=t)
    full, half = slabs
    assert half.weight.dtype == torch.bfloat16
    for name, value in half.state.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, full.state[name])  # the gradients do not see the rows
    torch.testing.assert_close(half.weight.float(), full.weight, atol=5e-2, rtol=5e-2)
    assert nn.functional.cosine_similarity(half.weight.float(), full.weight).min() > 0.999
