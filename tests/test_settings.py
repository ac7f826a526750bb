"""Specs, roles and optimizer settings: frozen, checked, and public names pinned."""

from __future__ import annotations

import dataclasses

import pytest

import hybridpar as hp
from hybridpar.specs import specs_by_feature


def spec(name: str = "t", **changes: object) -> hp.RemoteEmbeddingSpec:
    return hp.RemoteEmbeddingSpec(name, **({"num_embeddings": 3, "embedding_dim": 2} | changes))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: spec(""), "needs a name"),
        (lambda: spec(num_embeddings=0), "num_embeddings=0. Give a whole number of at least 1"),
        (lambda: spec(embedding_dim=1.5), "embedding_dim=1.5"),
        (lambda: spec(mode="avg"), "mode='avg'. Give one of 'sum', 'mean', 'max', None"),
        (lambda: spec(sharding="rows"), "sharding='rows'. Give one of"),
        (lambda: spec(features="ab"), r"features=\('ab',\)"),
        (lambda: specs_by_feature((spec(), spec())), "Two specs are named 't'"),
        (
            lambda: specs_by_feature((spec("a", features=("x",)), spec("x"))),
            "Feature 'x' is claimed by tables 'a' and 'x'",
        ),
        (lambda: hp.optim.SGD(lr=-1.0), "SGD got lr=-1.0"),
        (lambda: hp.optim.Adagrad(eps=-1.0), "Adagrad got eps=-1.0"),
        (
            lambda: hp.optim.RowWiseAdagrad(initial_accumulator_value=-1.0),
            "initial_accumulator_value=-1.0",
        ),
        (lambda: hp.Roles(trainers=0), "trainers=0. Give a whole number of at least 1"),
        (lambda: hp.Roles(trainers=1, servers=0), "servers=0"),
        (lambda: hp.RoleLauncher({"trainer": 1, "worker": 1}), 'Name "trainer" and "ps"'),
        (lambda: hp.RoleLauncher({"ps": 1}), 'Name "trainer" and "ps"'),
        (lambda: hp.RoleLauncher(2), "roles is 2. Give"),
        (lambda: hp.RoleLauncher({"trainer": 1}, timeout_s=0), "timeout_s is 0"),
        (
            lambda: hp.RoleLauncher({"trainer": 1}, device="cuda", start_method="forkserver"),
            "Use start_method='spawn'",
        ),
    ],
)
def test_bad_settings_are_refused(make, message: str) -> None:
    with pytest.raises(hp.SpecError, match=message):
        make()


@pytest.mark.parametrize("value", [spec(), hp.optim.Adagrad(), hp.Roles(trainers=1)], ids=str)
def test_settings_are_frozen(value) -> None:
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, 1)


def test_user_errors_are_value_errors() -> None:
    for kind in (hp.SpecError, hp.InputError, hp.TrainFunctionError):
        assert issubclass(kind, ValueError)
        assert issubclass(kind, hp.HybridParError)


def test_cuda_jobs_start_by_spawn() -> None:
    assert hp.RoleLauncher({"trainer": 1}, device="cuda").start_method == "spawn"
    assert hp.RoleLauncher({"trainer": 1}, device="cpu").start_method == "forkserver"


def test_threads_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert hp.RoleLauncher({"trainer": 1}).num_threads == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert hp.RoleLauncher({"trainer": 64}).num_threads == 1


def test_public_names() -> None:
    assert sorted(hp.__all__) == [
        "CallbackError", "Checkpoint", "CheckpointError", "EarlyStopping", "Evaluation",
        "ExportedModel",
        "FitResult", "HybridModel", "HybridParError", "InputError", "PeerLostError",
        "PlanReport", "RemoteEmbeddingSpec", "RemoteError", "RoleLauncher", "Roles", "ServerPlan",
        "SparseOptimizer", "SpecError", "TablePlan", "TrainFunctionError", "TrainerContext",
        "TrainerLoop", "TrainerPlan", "WaitTimeoutError", "WorkerError", "callbacks", "launch",
        "metrics", "optim", "plan",
    ]  # fmt: skip
    assert all(hasattr(hp, name) for name in hp.__all__)
