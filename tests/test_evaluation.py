"""Evaluation gives the same numbers whatever the number of trainers, and trains nothing."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch

import evaluated
import hybridpar as hp
import stopped
from hybridpar.checkpoint.folders import checkpoints
from hybridpar.trainer.evaluation.early_stopping import Patience

TWO = hp.Roles(trainers=2, servers=2)


def test_the_same_numbers_on_any_number_of_trainers_as_in_plain_torch() -> None:
    worlds = [
        hp.launch(evaluated.every_mode, roles=hp.Roles(trainers=trainers, servers=2), device="cpu")
        for trainers in (1, 2, 3)
    ]
    for mode in evaluated.MODES:
        first = worlds[0][0][mode]
        close = {"rel": 1e-2 if mode == "bfloat16" else 1e-6}
        assert first.results["loss"] == pytest.approx(first.plain_loss, **close)
        for world in worlds:
            for found in world:
                assert found[mode].untouched
                assert found[mode].results == world[0][mode].results
                assert found[mode].results == pytest.approx(first.results, rel=1e-9)


def test_hosted_modules_are_in_eval_mode() -> None:
    assert hp.launch(evaluated.hosted_modules, roles=hp.Roles(trainers=1)) == [(True, True, False)]


def test_a_table_with_max_norm_is_scaled_as_in_torch() -> None:
    ((rows, plain),) = hp.launch(evaluated.scaled_rows, roles=hp.Roles(trainers=1))
    torch.testing.assert_close(rows, plain)


def test_it_is_trainer_0s_running_averages_that_count() -> None:
    outcomes = hp.launch(evaluated.running_averages, roles=TWO)
    (first, second), _ = outcomes[0]
    assert first == pytest.approx(second, rel=1e-9)
    assert [unchanged for _, unchanged in outcomes] == [True, True]


def test_training_with_evaluations_is_bit_equal_to_training_without() -> None:
    without, with_some = (
        hp.launch(evaluated.train, roles=TWO, args=(evaluates,)) for evaluates in (False, True)
    )
    for rank in range(2):
        assert all(map(torch.equal, without[rank], with_some[rank]))


def test_what_cannot_be_evaluated_is_refused_on_every_trainer() -> None:
    messages = [
        "InputError: evaluate got no batch",
        r"There are metrics, but inputs=None. .*lambda output",
        "A metric is named 'loss'",
        "metrics is {'auc': 1}. Give a dict",
        r"SpecError: evaluation 2 got metrics={'m0': 'AUC'} on trainer0, and {'m1': 'AUC'} on tr",
        r"evaluation 3 got metrics={'m': 'BinnedAUC \(2,\) \(2,\)'} on trainer0, and .* \(3,\)'}",
        "fit got eval_every, metrics, but no eval_batches",
        "eval_batches is an iterator",
        "eval_every is 0",
        "fit 1 got eval_batches='none' on trainer0, and 'some' on trainer1",
        "fit 2 got eval_every=2 on trainer0, and 3 on trainer1",
        "EarlyStopping monitors 'auc'. There are 'loss'",
        r"no checkpoint setting",
    ]
    for found in hp.launch(evaluated.refusals, roles=TWO):
        assert len(found) == len(messages)
        for message, wanted in zip(found, messages, strict=True):
            assert re.search(wanted, message), message


def test_the_loops_own_count_of_samples_weighs_the_losses() -> None:
    ((loss, mean),) = hp.launch(evaluated.by_samples, roles=hp.Roles(trainers=1))
    assert loss == pytest.approx(mean, rel=1e-6)


def test_a_trainer_that_fails_is_named_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(hp.WorkerError, match=r"trainer1 .*InputError: .*1000|trainer1 .*user"):
        hp.launch(evaluated.fail_on_one, roles=TWO)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("counts", "every_two", "saved"),
    [
        ([7, 7], [(2, 0), (4, 0), (6, 0), (8, 1), (10, 1), (12, 1), (14, 2)], [5, 10]),
        ([3, 7], [(2, 0), (7, 1), (8, 1), (14, 2)], [7, 14]),
        ([7, 0], [(7, 1), (14, 2)], [7, 14]),
    ],
    ids=["even", "uneven", "none on one"],
)
def test_fit_evaluates_at_the_same_steps_on_all_trainers(
    counts: list[int], every_two: list[tuple[int, int]], saved: list[int], tmp_path: Path
) -> None:
    outcomes = hp.launch(evaluated.when, roles=TWO, args=(str(tmp_path), counts))
    assert outcomes == [[every_two, [(7, 1), (14, 2)]] * 2] * 2
    for directory in tmp_path.iterdir():
        assert [int(path.name[5:]) for path in checkpoints(directory)] == saved


def test_early_stopping_ends_all_trainers_at_once_and_restores_the_best(tmp_path: Path) -> None:
    for best in (False, True):
        outcomes = hp.launch(
            stopped.stop_early, roles=TWO,
            args=(str(tmp_path / str(best)), None, False, {"restore_best": best}, True),
        )  # fmt: skip
        wanted = hp.launch(stopped.first_steps, roles=TWO, args=(8 if best else 12,))
        for got, plain in zip(outcomes, wanted, strict=True):
            assert (got.steps, got.evaluated, got.early) == (12, [2, 4, 6, 8, 10, 12], True)
            assert got.whole.step == 12
            for name, rows in plain.rows.items():
                assert torch.equal(got.whole.rows[name], rows)
            for name, state in plain.state.items():
                assert torch.equal(got.whole.state[name], state)
            assert got.whole.lr == plain.lr


def test_a_resumed_run_stops_where_an_unbroken_one_does(tmp_path: Path) -> None:
    def run(where: str, fails_at: int | None, resume: bool) -> list[stopped.Stopped]:
        arguments = (str(tmp_path / where), fails_at, resume, {"restore_best": True})
        return hp.launch(stopped.stop_early, roles=TWO, args=arguments)

    unbroken = run("unbroken", None, False)
    for fails_at in (9, 11):
        with pytest.raises(hp.WorkerError, match="stopped on purpose"):
            run("broken", fails_at, fails_at > 9)
    for again in (False, True):
        for got, wanted in zip(run("broken", None, True), unbroken, strict=True):
            assert got.early
            assert got.evaluated == ([] if again else [10, 12])
            for name, rows in wanted.whole.rows.items():
                assert torch.equal(got.whole.rows[name], rows)


def test_the_best_of_a_checkpoint_is_kept_though_a_better_one_was_lost(tmp_path: Path) -> None:
    """Killed at step 8, the best, and resumed from 6, when 4 was the best; then none is better."""
    arguments = (str(tmp_path), 8, False, {"restore_best": True})
    with pytest.raises(hp.WorkerError, match="stopped on purpose"):
        hp.launch(stopped.stop_early, roles=TWO, args=arguments)
    arguments = (str(tmp_path), None, True, {"restore_best": True}, False, True)
    outcomes = hp.launch(stopped.stop_early, roles=TWO, args=arguments)
    wanted = hp.launch(stopped.first_steps, roles=TWO, args=(4,))
    for got, plain in zip(outcomes, wanted, strict=True):
        assert (got.evaluated, got.early) == ([8], True)
        for name, rows in plain.rows.items():
            assert torch.equal(got.whole.rows[name], rows)
    kept = [int(path.name[5:]) for path in checkpoints(tmp_path / "best")]
    assert kept == [2, 4], "those of the checkpoints of steps 3 and 6"


def test_checkpoints_that_not_all_trainers_see_are_refused(tmp_path: Path) -> None:
    for message in hp.launch(evaluated.resume_apart, roles=TWO, args=(str(tmp_path),)):
        assert "newest checkpoint='step-000000000002' on trainer0, and 'none' on trai" in message


def test_training_goes_on_after_it_was_stopped_within_a_pass() -> None:
    assert hp.launch(stopped.stop_and_go_on, roles=TWO) == [[(4, True, 7)] * 2] * 2


@pytest.mark.parametrize(
    ("options", "values", "ends_at", "best_step"),
    [
        ({"patience": 1}, [3, 2, 2, 1], 2, 1),
        ({"patience": 2}, [3, 2, 2, 1, 2, 3], 5, 3),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.6, 2.4, 2.0, 1.95], 4, 2),
        ({"patience": 2, "mode": "max"}, [1, 2, 2, 2], 3, 1),
        ({"patience": 2}, [float("nan"), 2, float("nan"), float("nan")], 3, 1),
        ({"patience": 2}, [float("nan"), float("nan")], 1, None),
        ({"patience": 2}, [float("inf"), 5.0, 4.0], None, 2),
    ],
)
def test_patience(
    options: dict, values: list[float], ends_at: int | None, best_step: int | None
) -> None:
    patience = Patience(hp.EarlyStopping(**options))
    ended = None
    for step, value in enumerate(values):
        kept, patience = patience.state_dict(), Patience(patience.settings)
        patience.load_state_dict(kept)
        patience.see(step, {"loss": float(value)})
        if patience.is_over:
            ended = step
            break
    assert (ended, patience.best_step) == (ends_at, best_step)


@pytest.mark.parametrize("options", [{"mode": "least"}, {"patience": 0}, {"min_delta": -1.0}])
def test_early_stopping_settings_are_checked(options: dict) -> None:
    with pytest.raises(hp.SpecError, match=f"EarlyStopping got {next(iter(options))}="):
        hp.EarlyStopping(**options)
