"""A step whose loss or gradients hold NaN or infinity: refused, left out exactly, or taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hybridpar as hp
import not_finite as n
from hybridpar.trainer.finite import first_non_finite

WORLD = hp.Roles(trainers=2, servers=2)
BAD: n.Bad = {(1, 1): "loss", (0, 3): "table", (1, 4): "dense"}


INF, NAN = float("inf"), float("nan")
LARGE = torch.full((4,), 6e4)


@pytest.mark.parametrize(
    ("tensors", "wanted"),
    [
        ([], ""),
        ([torch.ones(3)], ""),
        ([torch.empty(0, 4), torch.ones(2)], ""),
        ([torch.ones(3), torch.tensor([1.0, NAN])], "1"),
        ([torch.tensor([INF, -INF]), torch.tensor([NAN])], "0"),
        ([LARGE.half(), LARGE.half()], ""),
        ([torch.full((4,), 3e38), torch.full((4,), -3e38)], ""),
        ([torch.full((4,), 3e38), torch.tensor([-INF])], "1"),
        ([torch.tensor([1e300], dtype=torch.float64), torch.ones(1)], ""),
        ([torch.ones(2), torch.tensor([NAN], dtype=torch.bfloat16)], "1"),
        ([torch.tensor([complex(1.0, INF)])], "0"),
        ([torch.ones(2), torch.tensor([0.0, NAN]).to_sparse()], "1"),
    ],
    ids=["none", "ones", "empty", "nan", "inf", "half overflows", "sum overflows", "large and inf",
         "double", "bfloat16", "complex", "sparse"],
)  # fmt: skip
def test_the_first_that_is_not_finite(tensors: list[torch.Tensor], wanted: str) -> None:
    assert first_non_finite([(str(n), tensor) for n, tensor in enumerate(tensors)]) == wanted


def assert_left_out(outcome: n.Outcome, plain: n.Plain, skipped: int) -> None:
    assert outcome.result.skipped == skipped
    tables = {"a": plain.a.weight, "b": plain.b.weight}
    for name, rows in outcome.rows.items():
        torch.testing.assert_close(rows, tables[name].detach(), atol=1e-5, rtol=1e-5)
    expected = plain.state_dict()
    for name, value in outcome.dense.items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-5)


RUNS: dict[str, dict[str, Any]] = {
    "one of each": {"bad": BAD},
    "the first step": {"bad": {(0, 0): "all"}},
    "the last step": {"bad": {(1, 5): "loss"}},
    "on both trainers": {"bad": {(0, 2): "loss", (1, 2): "table"}},
    "two epochs": {"bad": BAD, "epochs": 2},
    "every step": {"bad": {(0, step): "loss" for step in range(6)}},
    "uneven": {"bad": BAD, "counts": [2, 6]},
    "uneven, bad in what only one has": {"bad": {(0, 5): "dense"}, "counts": [6, 3]},
    "accumulated": {"bad": {(1, 1): "loss", (0, 4): "table"}, "options": {"accumulate": 2}},
    "accumulated, uneven": {"bad": BAD, "counts": [3, 6], "options": {"accumulate": 2}},
    "no table": {"bad": BAD, "kind": "no table"},
    "no table, uneven": {"bad": BAD, "kind": "no table", "counts": [5, 6]},
    "shared buckets": {"bad": BAD, "options": {"ddp": {"gradient_as_bucket_view": True}}},
    "dense half clipped": {"bad": BAD, "options": {"clip_grad_norm": 1e6}},
}


def num_bad_steps(run: dict[str, Any], trainers: int) -> int:
    accumulate = run.get("options", {}).get("accumulate", 1)
    counts = run.get("counts", [6] * trainers)
    steps = {step // accumulate for rank, step in run["bad"] if step < counts[rank]}
    return len(steps) * run.get("epochs", 1)


def plain_of(run: dict[str, Any], trainers: int) -> n.Plain:
    more = {name: run[name] for name in ("counts", "epochs", "kind") if name in run}
    accumulate = run.get("options", {}).get("accumulate", 1)
    return n.leave_out(trainers, run["bad"], accumulate=accumulate, **more)


@pytest.fixture(scope="module")
def skipped() -> list[list[n.Outcome]]:
    return hp.launch(n.fit_many, roles=WORLD, args=(list(RUNS.values()),))


@pytest.mark.parametrize("name", RUNS)
def test_skipped_steps_are_left_out_exactly(name: str, skipped: list[list[n.Outcome]]) -> None:
    run, number = RUNS[name], list(RUNS).index(name)
    counts = run.get("counts", [6, 6])
    for rank, outcomes in enumerate(skipped):
        outcome = outcomes[number]
        plain = plain_of(run, trainers=2)
        assert bool(outcome.rows) == (run.get("kind") != "no table")
        mine = _skipped_while_there(run, counts[rank])
        assert_left_out(outcome, plain, mine)
    if counts == [6, 6]:
        assert skipped[0][number].result.skipped == skipped[1][number].result.skipped
        assert skipped[0][number].result.skipped == num_bad_steps(run, 2)


def _skipped_while_there(run: dict[str, Any], count: int) -> int:
    """The bad steps that a trainer with so many batches takes part in."""
    accumulate = run.get("options", {}).get("accumulate", 1)
    counts = run.get("counts", [6, 6])
    bad = {step // accumulate for rank, step in run["bad"] if step < counts[rank]}
    steps = -(-count // accumulate)
    return sum(step < steps for step in bad) * run.get("epochs", 1)


def test_losses_of_skipped_steps_count_nowhere(skipped: list[list[n.Outcome]]) -> None:
    names = list(RUNS)
    for outcomes in skipped:
        result = outcomes[names.index("one of each")].result
        assert result.steps == 6
        assert all(map(_finite, (result.first_loss, result.last_loss, *result.epoch_losses)))
        assert not _finite(outcomes[names.index("every step")].result.last_loss)


def _finite(value: float) -> bool:
    return bool(torch.tensor(value).isfinite())


def test_schedulers_step_all_the_same(skipped: list[list[n.Outcome]]) -> None:
    assert skipped[0][0].lrs == pytest.approx([n.LR * 0.8**6])


def test_one_trainer_alone_skips() -> None:
    runs = [{"bad": {(0, 1): "loss", (0, 4): "table"}}, {"bad": {(0, 2): "all"}}]
    (outcomes,) = hp.launch(n.fit_many, roles={"trainer": 1, "ps": 2}, args=(runs,))
    for run, outcome in zip(runs, outcomes, strict=True):
        assert_left_out(outcome, plain_of(run, trainers=1), num_bad_steps(run, 1))


@pytest.mark.parametrize(
    "options",
    [{}, {"consistency": "async"}, {"consistency": "bounded", "staleness": 1}],
    ids=["sync", "async", "bounded"],
)
def test_tables_alone_skip_in_every_consistency(options: dict[str, Any]) -> None:
    """Every row counts the pushes it got: none of a skipped step, of no trainer."""
    bad: n.Bad = {(0, 1): "loss", (1, 4): "table"}
    given = {"sparse_optimizer": hp.optim.SGD(lr=1.0), "schedulers": no_schedules} | options
    run = {"bad": bad, "kind": "no dense", "options": given}
    seen = torch.zeros(n.ROWS)
    for rank in range(2):
        for batch in n.batches(rank, n.STEPS, bad):
            if batch.step not in (1, 4):
                seen += torch.bincount(batch.b, minlength=n.ROWS) / 2
    for outcomes in hp.launch(n.fit_many, roles=WORLD, args=([run],)):
        assert outcomes[0].result.skipped == 2
        torch.testing.assert_close(outcomes[0].rows["b"][:, 0], -seen)


def no_schedules(*optimizers: object) -> list[Any]:
    return []


@pytest.mark.parametrize(
    ("bad", "options", "message"),
    [
        ({(1, 2): "loss"}, {}, r"The loss on trainer1 \(step 2\) is nan. Look at what is in that"),
        ({(1, 2): "loss"}, {"accumulate": 2}, r"The loss on trainer1 \(step 1\) is nan"),
        ({(0, 3): "table"}, {}, r"of table 'b' on trainer0 \(step 3\) is not finite. Look at"),
        ({(1, 3): "table"}, {"consistency": "async"}, r"of table 'b' on trainer1 \(step 3\)"),
        (
            {(1, 1): "table"},
            {"sparse_optimizer": hp.optim.SGD(lr=0.1, clip_norm=1.0)},
            r"of table 'b' on trainer1 \(step 1\) is not finite",
        ),
        ({(1, 1): "dense"}, {}, r"of parameter 'weight' on trainer1 \(step 1\) is not finite"),
        (
            {(1, 1): "dense"},
            {"average_by": "ddp"},
            r"of parameter 'weight' on trainer1 \(step 1\) is not finite",
        ),
        ({(1, 2): "all"}, {}, r"of table '[ab]' on trainer1 \(step 2\) is not finite"),
        (
            {(1, 2): "all"},
            {"sparse_optimizer": hp.optim.SGD(lr=0.1, clip_norm=1.0)},
            r"of table '[ab]' on trainer1 \(step 2\) is not finite",
        ),
        (
            {(1, 1): "dense"},
            {"ddp": {"gradient_as_bucket_view": True}, "average_by": "ddp"},
            r"of parameter 'weight' on trainer[01] \(step 1\), averaged over the trainers, is not",
        ),
    ],
    ids=["loss", "loss, accumulated", "table", "table, async", "table, clipped", "dense",
         "dense, by DDP", "all", "all, clipped", "dense, shared buckets"],
)  # fmt: skip
def test_the_trainer_that_has_it_is_named(bad: n.Bad, options: dict, message: str) -> None:
    message = message.replace("'weight'", r"'top\.weight'")
    with pytest.raises(hp.WorkerError, match=message) as caught:
        hp.launch(n.fit, roles=WORLD, args=(bad, None, "both", {"non_finite": "raise"} | options))
    ((rank, _),) = bad
    assert caught.value.cause.startswith("raised InputError: The ")
    if "averaged" not in message:
        assert caught.value.rank == rank
    assert 'TrainerLoop(non_finite="skip")' in str(caught.value)


def servers_before_and_after(ctx: hp.TrainerContext, kind: str) -> list[bool]:
    """Whether the tables stay as they were when a step is refused."""
    model = n.Model()
    loop = hp.TrainerLoop(
        model, ctx, loss=n.as_it_is, dense_optimizer=n.adam, sparse_optimizer=hp.optim.SGD(lr=0.1)
    )
    loop.fit(n.batches(0, 2, {}))
    before = [model.rows(name) for name in ("a", "b")]
    try:
        loop.fit(n.batches(0, 2, {(0, 0): kind}))
    except hp.InputError:
        return [torch.equal(rows, model.rows(x)) for rows, x in zip(before, "ab", strict=True)]
    return []


@pytest.mark.parametrize("kind", ["loss", "table", "dense", "all"])
def test_nothing_of_a_refused_step_is_sent(kind: str) -> None:
    (same,) = hp.launch(servers_before_and_after, roles={"trainer": 1, "ps": 1}, args=(kind,))
    assert same == [True, True]


def test_ignore_takes_the_step_as_plain_torch_does() -> None:
    ignored = {"non_finite": "ignore"}
    for outcome in hp.launch(n.fit, roles=WORLD, args=({(1, 2): "loss"}, None, "both", ignored)):
        assert outcome.result.skipped == 0
        assert not outcome.dense["top.weight"].isfinite().all()
        assert not outcome.rows["b"].isfinite().all()


def with_scaler(ctx: hp.TrainerContext, policy: str) -> tuple[int, bool]:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    outcome = n.fit(
        ctx, {(1, 2): "loss"}, None, "both", {"non_finite": policy, "grad_scaler": scaler}
    )
    finite = all(rows.isfinite().all() for rows in outcome.rows.values())
    return outcome.result.skipped, finite


@pytest.mark.parametrize("policy", ["raise", "skip", "ignore"])
def test_a_scaler_decides_whatever_the_policy(policy: str) -> None:
    assert hp.launch(with_scaler, roles=WORLD, args=(policy,)) == [(1, True)] * 2


def test_large_gradients_are_not_taken_for_infinite() -> None:
    assert hp.launch(n.large_but_finite, roles=WORLD) == [2, 2]
