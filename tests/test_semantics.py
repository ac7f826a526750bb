"""Training semantics: consistency, accumulation, precision, clipping, DDP's options, freezing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hybridpar as hp
import semantics as s
from scenarios import LR, ROWS, STEPS, dense_sgd, head, loss_of
from test_rules import RULES

CLOSE = {"atol": 1e-6, "rtol": 1e-6}
WORLD = hp.Roles(trainers=2, servers=2)


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR)


def assert_like(outcome: s.Outcome, plain: s.PlainTwo, close: dict[str, float] = CLOSE) -> None:
    for name, table in (("a", plain.a), ("b", plain.b)):
        torch.testing.assert_close(outcome.rows[name], table.weight.detach(), **close)
    torch.testing.assert_close(outcome.top, plain.top.weight.detach(), **close)


# -- optimizers, end to end ------------------------------------------------------------------------


class OnTouchedRows(torch.optim.Optimizer):
    """A reference rule of test_rules on the rows with a gradient, of one table."""

    def __init__(self, params: list[Tensor], name: str) -> None:
        super().__init__(params, {})
        self._settings, self._rule = RULES[name]
        (weight,) = params
        for key, width in self._settings.state_widths(weight.shape[1]).items():
            value = self._settings.initial_state(key)
            self.state[weight][key] = torch.full((weight.shape[0], width), value)
        self._t = 0

    @torch.no_grad()
    def step(self) -> None:
        self._t += 1
        (weight,) = self.param_groups[0]["params"]
        if weight.grad is None:
            return
        touched = (weight.grad != 0).any(1).nonzero().squeeze(1)
        state = self.state[weight]
        rows, part = weight[touched], {name: value[touched] for name, value in state.items()}
        self._rule(rows, part, weight.grad[touched], self._t)
        weight[touched] = rows
        for name, value in part.items():
            state[name][touched] = value


PAIRS = [
    (name, ("table_wise", "row_wise", "column_wise")[number % (2 if settings.row_wise else 3)])
    for number, (name, (settings, _)) in enumerate(RULES.items())
]


@pytest.mark.parametrize(("name", "sharding"), PAIRS)
def test_every_optimizer_over_the_servers(name: str, sharding: str) -> None:
    """And a lookup that the loss ignores moves nothing: in odd steps, table "b"."""
    options = {"sparse_optimizer": RULES[name][0]}
    outcomes = hp.launch(s.fit_two, roles=WORLD, args=(options, None, {"sharding": sharding}))
    plain = s.plain_two(2, sparse=functools.partial(OnTouchedRows, name=name))
    for outcome in outcomes:
        assert_like(outcome, plain, {"atol": 2e-6, "rtol": 1e-5})


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_norm_is_clipped_over_all_servers(sharding: str) -> None:
    options = {"sparse_optimizer": hp.optim.SGD(lr=LR, clip_norm=0.3)}
    outcomes = hp.launch(s.fit_two, roles=WORLD, args=(options, None, {"sharding": sharding}))

    def clip(model: s.PlainTwo) -> None:
        for table in (model.a, model.b):
            nn.utils.clip_grad_norm_(table.parameters(), 0.3)

    plain = s.plain_two(2, sparse=sgd, before_step=clip)
    for outcome in outcomes:
        assert_like(outcome, plain)


def test_tables_with_settings_of_their_own_under_a_scheduler() -> None:
    (groups, outcome), _ = hp.launch(s.own_settings, roles=WORLD)
    assert groups == [(("a",), 0.4), (("b",), 0.2)]
    plain = s.PlainTwo()
    optimizers = [
        torch.optim.Adagrad(plain.a.parameters(), lr=0.4),
        torch.optim.SGD(plain.b.parameters(), lr=0.2),
    ]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.5) for o in optimizers]
    for pair in zip(s.batches(0), s.batches(1), strict=True):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for batch in pair:
            (sum(plain(batch).values()) / 2).backward()
        for stepping in (*optimizers, *schedules):
            stepping.step()
    for name, table in (("a", plain.a), ("b", plain.b)):
        torch.testing.assert_close(outcome.rows[name], table.weight.detach(), **CLOSE)


def test_a_mapping_names_each_tables_settings() -> None:
    mapping = {"a": hp.optim.SGD(lr=LR), "b": hp.optim.SGD(lr=LR, weight_decay=0.0)}
    for outcome in hp.launch(s.fit_two, roles=WORLD, args=({"sparse_optimizer": mapping},)):
        assert_like(outcome, s.plain_two(2, sparse=sgd))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparse_optimizer": torch.optim.Adam}, r"give the settings hybridpar.optim.Adam\(lr"),
        ({"sparse_optimizer": hp.optim.Adam}, r"give the settings hybridpar.optim.Adam\(lr"),
        ({"sparse_optimizer": None}, "Table 'a' has no optimizer"),
        ({"sparse_optimizer": {"a": hp.optim.SGD()}}, "Table 'b' has no optimizer"),
        (
            {"sparse_optimizer": {n: hp.optim.SGD() for n in "abc"}},
            "sparse_optimizer names c, which are no tables",
        ),
        ({"dense_optimizer": hp.optim.Adam(lr=0.1)}, r"lambda params: torch.optim.Adam\(params"),
        (
            {"dense_optimizer": hp.optim.RowWiseAdagrad},
            r"lambda params: torch.optim.Adagrad\(params",
        ),
        ({"consistency": "eventual"}, "Choose one of 'sync', 'async', 'bounded'"),
        ({"consistency": "bounded"}, "got staleness=None"),
        ({"staleness": 3}, "goes with consistency='bounded', not 'sync'"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"comm_hook": (1, 2)}, r"comm_hook is \(1, 2\). Give a function from the process group"),
        ({"accumulate": 2, "ddp": {"static_graph": True}}, "cannot accumulate with static_graph"),
        ({"average_by": "trainers"}, "Choose one of 'auto', 'ddp', 'servers'"),
        (
            {"average_by": "servers", "consistency": "async"},
            r"average_by='servers' goes without consistency='async'\. Leave out one",
        ),
        ({"average_by": "servers", "non_finite": "skip"}, r"goes without non_finite='skip'"),
        ({"average_by": "servers", "comm_hook": s.no_hook}, r"goes without comm_hook"),
        (
            {"average_by": "servers", "ddp": {"mixed_precision": None}},
            r"goes without ddp=\{'mixed_precision'",
        ),
        ({"ddp": {"process_group": None}}, "ddp has 'process_group'"),
        ({"loss": lambda output, batch: output["a"].expand(2)}, r"is of shape \(2,\). Return a"),
        ({"loss": lambda output, batch: 1.0}, "Return a scalar tensor"),
    ],
    ids=range(21),
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    if "loss" in options:  # not a lambda: it would not cross
        options = {
            "loss": {True: expanded, False: a_float}["expand" in message or "shape" in message]
        }
    with pytest.raises(hp.WorkerError, match=message):
        hp.launch(s.wrong_settings, roles=hp.Roles(trainers=1), args=(options,))


def expanded(output: dict[str, Tensor], batch: s.Batch) -> Tensor:
    return output["a"].expand(2)


def a_float(output: dict[str, Tensor], batch: s.Batch) -> float:
    return 1.0


# -- consistency -----------------------------------------------------------------------------------


def counted(trainers: int, counts: list[int]) -> Tensor:
    """How often every id was asked for, by all."""
    seen = torch.zeros(ROWS)
    for rank in range(trainers):
        for ids in s.count_ids(rank, counts[rank]):
            seen += torch.bincount(ids, minlength=ROWS)
    return seen


@pytest.mark.parametrize("counts", [[8, 8, 8], [9, 2, 5], [0, 4, 3]], ids=str)
@pytest.mark.parametrize(
    ("consistency", "staleness"),
    [("sync", None), ("async", None), ("bounded", 0), ("bounded", 1), ("bounded", 3)],
)
def test_no_update_is_lost_or_doubled(
    consistency: str, staleness: int | None, counts: list[int]
) -> None:
    roles = hp.Roles(trainers=3, servers=2)
    # Sync mode divides by the trainers in a step, so there a gradient of one counts in part.
    results = hp.launch(s.count_updates, roles=roles, args=(consistency, staleness, counts, False))
    for rank, (rows, met) in enumerate(results):
        if consistency != "sync":
            assert torch.equal(rows, -counted(3, [2 * count for count in counts]))
        assert sum(met.values()) == 2 * counts[rank], "every batch's staleness is counted once"
        bound = {"sync": 0, "async": 10**6}.get(consistency, staleness)
        assert all(0 <= behind <= bound for behind in met)
        if consistency == "async" or staleness in (1, 3):
            assert max(met, default=1) >= 1, "rows fetched ahead lack the step under way"


def test_gradients_on_arrival_are_scaled_unless_asked_not_to() -> None:
    args = ("async", None, [6, 6], True)
    for rows, _ in hp.launch(s.count_updates, roles=WORLD, args=args):
        assert torch.equal(rows, -counted(2, [12, 12]) / 2)


@pytest.mark.parametrize(
    ("consistency", "staleness"), [("bounded", 0), ("bounded", 2), ("async", None)]
)
def test_the_bound_alone_holds_a_fast_trainer_back(consistency: str, staleness: int | None) -> None:
    results = hp.launch(s.run_ahead, roles=WORLD, args=(consistency, staleness))
    for rows, met in results:
        assert torch.equal(rows, -counted(2, [30, 30]))
        assert sum(met.values()) == 30
        if staleness is not None:
            assert max(met) <= staleness
    fast = results[0][1]
    assert max(fast) >= (3 if staleness is None else staleness), f"it ran ahead: {fast}"


# -- steps and losses ------------------------------------------------------------------------------


def test_several_losses_are_summed() -> None:
    for outcome in hp.launch(s.fit_two, roles=WORLD, args=({},)):
        assert_like(outcome, s.plain_two(2, sparse=sgd))


@pytest.mark.parametrize("consistency", ["sync", "async"])
@pytest.mark.parametrize("counts", [[6, 6], [5, 3]], ids=str)
def test_gradients_of_several_batches_accumulate(counts: list[int], consistency: str) -> None:
    options = {"accumulate": 2, "consistency": consistency}
    outcomes = hp.launch(s.fit_two, roles=WORLD, args=(options, counts))
    plain = s.plain_two(2, sparse=sgd, accumulate=2, counts=counts)
    for outcome, count in zip(outcomes, counts, strict=True):
        assert outcome.result.steps == -(-count // 2)
        if consistency == "sync":
            assert_like(outcome, plain)


def test_a_frozen_table_keeps_its_rows_until_unfrozen() -> None:
    for first, frozen, thawed, again in hp.launch(s.freeze_and_thaw, roles=WORLD):
        assert torch.equal(first, frozen)
        assert not torch.equal(frozen, thawed)
        assert torch.equal(thawed, again)


def test_per_sample_weights_are_learned() -> None:
    plain, scale = s.PlainTwo(), nn.Parameter(torch.linspace(0.5, 1.5, ROWS))
    optimizer = dense_sgd([plain.a.weight, scale, *plain.top.parameters()])
    for pair in zip(s.batches(0), s.batches(1), strict=True):
        optimizer.zero_grad()
        for batch in pair:
            pooled = plain.a(*batch.a, per_sample_weights=scale[batch.a[0]])
            (loss_of(plain.top, pooled) / 2).backward()
        optimizer.step()
    for rows, learned in hp.launch(s.fit_learned, roles=WORLD):
        torch.testing.assert_close(rows, plain.a.weight.detach(), **CLOSE)
        torch.testing.assert_close(learned, scale.detach(), **CLOSE)


def test_a_thousand_tables() -> None:
    assert hp.launch(s.fit_many, roles=WORLD, args=(1000,)) == [(3, True)] * 2


# -- the dense half --------------------------------------------------------------------------------


def test_autocast_runs_the_dense_half_in_bfloat16() -> None:
    outcomes = hp.launch(s.fit_two, roles=WORLD, args=({"autocast": torch.bfloat16},))
    for outcome in outcomes:
        assert outcome.notes == "torch.bfloat16"
        assert_like(outcome, s.plain_two(2, sparse=sgd), {"atol": 5e-2, "rtol": 5e-2})


def test_loss_scaling_changes_nothing_but_the_scale() -> None:
    for outcome in hp.launch(s.scaler_of, roles=WORLD, args=(None,)):
        assert outcome.result.skipped == 0
        assert_like(outcome, s.plain_two(2, sparse=sgd), {"atol": 1e-5, "rtol": 1e-5})


def test_a_step_that_overflows_on_one_trainer_is_skipped_by_all() -> None:
    outcomes = hp.launch(s.scaler_of, roles=WORLD, args=(2,))

    def forget(model: s.PlainTwo, seen: list[int] = []) -> None:  # noqa: B006
        seen.append(1)
        if len(seen) == 3:  # step 2
            model.zero_grad()

    plain = s.plain_two(2, sparse=sgd, before_step=forget)
    for outcome in outcomes:
        assert outcome.result.skipped == 1
        assert outcome.notes == 512.0
        assert_like(outcome, plain, {"atol": 1e-5, "rtol": 1e-5})


@pytest.mark.parametrize("clip", [{"clip_grad_norm": 0.05}, {"clip_grad_value": 0.01}], ids=str)
def test_the_dense_gradient_is_clipped(clip: dict[str, float]) -> None:
    def before_step(model: s.PlainTwo) -> None:
        if "clip_grad_norm" in clip:
            nn.utils.clip_grad_norm_(model.top.parameters(), 0.05)
        else:
            nn.utils.clip_grad_value_(model.top.parameters(), 0.01)

    plain = s.plain_two(2, sparse=sgd, before_step=before_step)
    for outcome in hp.launch(s.fit_two, roles=WORLD, args=(clip,)):
        assert_like(outcome, plain)


def test_unused_parameters_need_ddps_option_and_get_it() -> None:
    with pytest.raises(hp.WorkerError, match="find_unused_parameters"):
        hp.launch(s.fit_branches, roles=WORLD, args=({},))
    first, second = hp.launch(s.fit_branches, roles=WORLD, args=({"find_unused_parameters": True},))
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.ones_like(first))


def test_other_ddp_options_reach_it() -> None:
    options = {"ddp": {"static_graph": True, "gradient_as_bucket_view": True}}
    with pytest.raises(hp.WorkerError, match=r"TypeError.*no_such_option"):
        hp.launch(s.fit_two, roles=WORLD, args=({"ddp": {"no_such_option": 1}},))
    for outcome in hp.launch(s.fit_two, roles=WORLD, args=(options,)):
        assert_like(outcome, s.plain_two(2, sparse=sgd))


def test_a_comm_hook_reduces_the_dense_gradients() -> None:
    for outcome, calls in hp.launch(s.fit_with_hook, roles=WORLD):
        assert calls >= STEPS
        assert_like(outcome, s.plain_two(2, sparse=sgd))


@pytest.mark.parametrize("counts", [[4, 4], [5, 2]], ids=str)
def test_a_model_without_a_remote_table(counts: list[int]) -> None:
    plain, top = s.PlainTwo().a, head()
    optimizer = dense_sgd([*plain.parameters(), *top.parameters()])
    data = [s.batches(rank, count) for rank, count in enumerate(counts)]
    for _ in range(2):
        for step in range(max(counts)):
            active = [own[step] for own in data if step < len(own)]
            optimizer.zero_grad()
            for batch in active:
                (loss_of(top, plain(*batch.a)) / len(active)).backward()
            optimizer.step()
    for weight in hp.launch(s.fit_all_dense, roles=WORLD, args=(counts,)):
        torch.testing.assert_close(weight, plain.weight.detach(), **CLOSE)
