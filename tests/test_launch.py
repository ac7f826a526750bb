"""Starting and ending jobs that go well."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hybridpar as hp
from faulty import leaves_a_child, make_loop
from worlds import Batch, collate, make_batch


def who(ctx: hp.TrainerContext, *args: object) -> tuple[object, ...]:
    return ctx.rank, ctx.num_trainers, ctx.num_servers, str(ctx.device), *args


def tensor_of(ctx: hp.TrainerContext) -> torch.Tensor:
    return torch.full((1000,), float(ctx.rank))


def environment(ctx: hp.TrainerContext) -> tuple[str | None, str, int, float]:
    return os.environ.get("MARK"), os.getcwd(), torch.get_num_threads(), torch.rand(()).item()


@pytest.mark.parametrize("roles", [hp.Roles(trainers=3, servers=2), {"trainer": 3, "ps": 2}])
def test_results_come_in_rank_order(roles: hp.Roles | dict[str, int]) -> None:
    wanted = [(rank, 3, 2, "cpu", "x", 1) for rank in range(3)]
    assert hp.launch(who, roles=roles, args=("x", 1)) == wanted


def test_four_trainers_and_four_servers() -> None:
    assert len(hp.launch(who, roles=hp.Roles(trainers=4, servers=4))) == 4


def test_results_may_be_tensors() -> None:
    for rank, result in enumerate(hp.launch(tensor_of, roles=hp.Roles(trainers=2))):
        assert torch.equal(result, torch.full((1000,), float(rank)))


def test_processes_get_the_callers_environment(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("MARK", "here")
    monkeypatch.chdir(tmp_path)
    launcher = hp.RoleLauncher(hp.Roles(trainers=2), num_threads=1)
    (mark, folder, threads, draw), (_, _, _, other_draw) = launcher.run(environment)
    assert (mark, folder, threads) == ("here", str(tmp_path), 1)
    assert draw != other_draw, "processes forked from one server must not draw the same numbers"


def test_processes_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hybridpar"):
        hp.launch(who, roles=hp.Roles(trainers=1))
    names = [record.getMessage().split()[0] for record in caplog.records]
    assert names == ["master", "ps0", "trainer0"]


def test_two_jobs_at_once_do_not_meet() -> None:
    results: dict[int, object] = {}

    def job(number: int) -> None:
        results[number] = hp.launch(who, roles=hp.Roles(trainers=2), args=(number,))

    threads = [threading.Thread(target=job, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for number in range(2):
        assert results[number] == [(rank, 2, 1, "cpu", number) for rank in range(2)]


def test_spawn_starts_the_same_job() -> None:
    launcher = hp.RoleLauncher({"trainer": 1}, start_method="spawn")
    assert launcher.run(who) == [(0, 1, 1, "cpu")]


def test_what_a_trainer_forgets_is_ended(tmp_path) -> None:
    hp.launch(leaves_a_child, roles=hp.Roles(trainers=2), args=(str(tmp_path),))
    assert len(list(tmp_path.iterdir())) == 2  # that nothing is left, the harness checks


def fit_every_kind(ctx: hp.TrainerContext) -> list[int]:
    """How many steps each kind of source gave, two epochs each."""
    torch.manual_seed(0)
    loop = make_loop(ctx)
    rows = TensorDataset(torch.arange(40))
    sampler = DistributedSampler(rows, ctx.num_trainers, ctx.rank)
    loader = DataLoader(rows, 5, sampler=sampler, num_workers=1, collate_fn=collate)
    sources = [
        [make_batch(number, bags=True) for number in range(3)],
        (make_batch(number, bags=True) for number in range(3)),
        lambda epoch: (make_batch(number, bags=True) for number in range(1 + epoch % 2)),
        loader,
    ]
    return [loop.fit(source, epochs=2).steps for source in sources]


def test_any_iterable_gives_batches() -> None:
    assert hp.launch(fit_every_kind, roles=hp.Roles(trainers=2)) == [[6, 6, 3, 8]] * 2


def schedule_and_rows(ctx: hp.TrainerContext) -> torch.Tensor:
    """One SGD step at lr 1, one at lr 0.1, by a torch scheduler; gradients are ones."""
    model = hp_model()
    optimizer = model.connect(ctx, hp.optim.SGD(lr=1.0))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    for _ in range(2):
        model.lookup(torch.tensor([3]))["t"].sum().backward()
        optimizer.step()
        schedule.step()
    # A lookup that the loss ignores, and one that is zeroed, change nothing.
    model.lookup(torch.tensor([4]))
    model.lookup(torch.tensor([5]))["t"].sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    return model.rows("t", torch.tensor([3, 4, 5, 3]))


class Tiny(hp.HybridModel[torch.Tensor]):
    def __init__(self) -> None:
        super().__init__(
            hp.RemoteEmbeddingSpec("t", num_embeddings=6, embedding_dim=2, init=torch.zero_)
        )

    def sparse_inputs(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"t": batch}

    def forward(self, embeddings: dict[str, torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
        return embeddings["t"]


def hp_model() -> Tiny:
    return Tiny()


def test_torch_schedulers_drive_the_sparse_half() -> None:
    for rows in hp.launch(schedule_and_rows, roles=hp.Roles(trainers=2, servers=2)):
        assert torch.allclose(rows[:, 0], torch.tensor([-1.1, 0.0, 0.0, -1.1]))


def accumulate(ctx: hp.TrainerContext) -> torch.Tensor:
    """Two lookups, one of them used twice, before one step."""
    model = Tiny()
    optimizer = model.connect(ctx, hp.optim.SGD(lr=1.0))
    first = model.lookup(torch.tensor([0, 1]))["t"]
    second = model.lookup(torch.tensor([1, 1]))["t"]
    first.sum().backward()
    (2 * second).sum().backward()
    optimizer.step()
    return model.rows("t")[:, 0]


def test_gradients_accumulate_until_the_step() -> None:
    (rows,) = hp.launch(accumulate, roles=hp.Roles(trainers=1))
    assert rows.tolist() == [-1.0, -5.0, 0.0, 0.0, 0.0, 0.0]


def no_dense_parameters(ctx: hp.TrainerContext) -> torch.Tensor:
    model = Tiny()
    loop = hp.TrainerLoop(
        model,
        ctx,
        loss=lambda output, batch: output.sum(),
        dense_optimizer=lambda params: pytest.fail("there are none"),
        sparse_optimizer=hp.optim.SGD(lr=1.0),
    )
    loop.fit([torch.tensor([ctx.rank])] * 2)
    return model.rows("t")[:, 0]


def test_a_dense_half_without_parameters() -> None:
    for rows in hp.launch(no_dense_parameters, roles=hp.Roles(trainers=2)):
        assert rows.tolist() == [-1.0, -1.0, 0.0, 0.0, 0.0, 0.0]


def eval_mode(ctx: hp.TrainerContext) -> bool:
    loop = make_loop(ctx)
    model = loop.model
    batch: Batch = make_batch(1, bags=True)
    with torch.no_grad():
        fixed = model(model.lookup(batch), batch)
    assert not fixed.requires_grad
    loop.fit([batch])
    with torch.no_grad():
        moved = model(model.lookup(batch), batch)
    return bool(F.cross_entropy(moved, batch.label) < F.cross_entropy(fixed, batch.label))


def test_lookup_without_gradients() -> None:
    assert all(hp.launch(eval_mode, roles=hp.Roles(trainers=2)))


def test_importing_does_nothing_else() -> None:
    code = (
        "import multiprocessing, os, logging, threading\n"
        "before = dict(os.environ)\n"
        "import hybridpar\n"
        "assert before == dict(os.environ)\n"
        "assert multiprocessing.get_start_method(allow_none=True) is None\n"
        "assert not logging.getLogger().handlers and threading.active_count() == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
