"""Train, stop, go on: what was saved is whole, and training goes on as if it had not stopped."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridpar as hp
import saved
from hybridpar import cli
from hybridpar.checkpoint.folders import checkpoints
from hybridpar.checkpoint.manifest import MANIFEST
from hybridpar.server import snapshot
from hybridpar.server.snapshot import Snapshot
from saved import BATCHES, EPOCHS, OPTIMIZERS, Whole

ROLES = hp.Roles(trainers=2, servers=2)
TOTAL = BATCHES * EPOCHS
CLOSE = {"atol": 1e-6, "rtol": 1e-6}


def assert_equal(got: Whole, wanted: Whole, *, exactly: bool = True) -> None:
    assert got.step == wanted.step
    assert got.lr == wanted.lr
    for what in ("rows", "state", "dense"):
        ours, theirs = getattr(got, what), getattr(wanted, what)
        assert ours.keys() == theirs.keys()
        for name in ours:
            if exactly:
                assert torch.equal(ours[name], theirs[name]), f"{what} {name}"
            else:
                torch.testing.assert_close(ours[name], theirs[name], **CLOSE, msg=f"{what} {name}")
    for mine, other in zip(got.momentum, wanted.momentum, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)


@functools.cache
def unbroken(optimizer: str) -> list[Whole]:
    return hp.launch(saved.train, roles=ROLES, args=(None, None, False, {"optimizer": optimizer}))


def stop(checkpoint: hp.Checkpoint, step: int, **options: Any) -> None:
    """Train until a failure at a step."""
    with pytest.raises(hp.WorkerError, match="stopped on purpose"):
        hp.launch(saved.train, roles=ROLES, args=(checkpoint, step, True, options))


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_resumed_at_any_step_is_bit_equal(
    optimizer: str, wait: bool, tmp_path: Path
) -> None:
    checkpoint = hp.Checkpoint(tmp_path, every=2, keep=100, wait=wait)
    for step in (1, 5, 13):  # with nothing saved yet; in the midst of an epoch; in another
        stop(checkpoint, step, optimizer=optimizer)
    results = hp.launch(
        saved.train, roles=ROLES, args=(checkpoint, None, True, {"optimizer": optimizer})
    )
    for got, wanted in zip(results, unbroken(optimizer), strict=True):
        assert_equal(got, wanted)
    assert json.loads((checkpoints(tmp_path)[-1] / MANIFEST).read_text())["step"] == TOTAL - 1


def test_a_job_that_is_restarted_equals_one_that_never_failed(tmp_path: Path) -> None:
    checkpoint = hp.Checkpoint(tmp_path, every=3)
    results = hp.launch(
        saved.train_and_die, roles=ROLES, args=(checkpoint, (5, 11, 16)), max_restarts=3
    )
    for got, wanted in zip(results, unbroken("adam"), strict=True):
        assert_equal(got, wanted)


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("servers", [1, 3])
def test_training_goes_on_under_another_layout(servers: int, sharding: str, tmp_path: Path) -> None:
    checkpoint = hp.Checkpoint(tmp_path, every=4)
    stop(checkpoint, 10)
    results = hp.launch(
        saved.train,
        roles=hp.Roles(trainers=2, servers=servers),
        args=(checkpoint, None, True, {"sharding": sharding}),
    )
    for got, wanted in zip(results, unbroken("adam"), strict=True):
        assert_equal(got, wanted, exactly=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the end of training, row-wise on two servers."""
    directory = tmp_path_factory.mktemp("checkpoints")
    options = {"sharding": "row_wise"}
    hp.launch(saved.train, roles=ROLES, args=(hp.Checkpoint(directory), None, False, options))
    return checkpoints(directory)[-1]


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize(("trainers", "servers"), [(1, 1), (3, 2), (1, 3)])
def test_a_checkpoint_loads_on_any_number_of_trainers_and_servers(
    trainers: int, servers: int, sharding: str, folder: Path
) -> None:
    roles = hp.Roles(trainers=trainers, servers=servers)
    results = hp.launch(saved.load, roles=roles, args=(str(folder), {"sharding": sharding}, {}))
    for got in results:
        assert_equal(got, unbroken("adam")[0], exactly=False)
        for name, rows in got.rows.items():
            assert rows.shape == unbroken("adam")[0].rows[name].shape


def test_every_save_is_a_whole_and_consistent_snapshot(tmp_path: Path) -> None:
    """Training goes on while the rows are written: each checkpoint is of one moment."""
    rows = 300_000  # some chunks a server
    checkpoint = hp.Checkpoint(tmp_path, every=1, keep=10)
    seen = hp.launch(saved.each_step, roles=ROLES, args=(checkpoint, rows))[0]
    found = checkpoints(tmp_path)
    assert len(found) == len(seen)
    for path, wanted in zip(found, seen, strict=True):
        assert cli.main(["checkpoint", "verify", str(path)]) == 0
        got = hp.launch(load_large, roles=hp.Roles(trainers=1), args=(str(path), rows))[0]
        assert torch.equal(got, wanted)


def load_large(ctx: hp.TrainerContext, path: str, rows: int) -> torch.Tensor:
    loop = hp.TrainerLoop(
        saved.Large(rows), ctx,
        loss=lambda output, batch: output.mean(),
        dense_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        sparse_optimizer=hp.optim.Adagrad(lr=0.5),
    )  # fmt: skip
    loop.load(path)
    return loop.model.rows("large")


def test_a_snapshot_holds_little_beside_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_CHUNK_BYTES", 1000 * (4 * 4 + 4))
    draw = torch.Generator().manual_seed(0)
    weight, state = torch.rand(10_500, 4), torch.rand(10_500, 1)
    wanted = {"weight": weight.clone(), "sum": state.clone()}
    taken = Snapshot({"weight": weight, "sum": state})
    got: dict[str, list[torch.Tensor]] = {"weight": [], "sum": []}
    touched = 0
    for chunk in taken.chunks():
        for name, values in chunk.items():
            got[name].append(values)
        for _ in range(3):  # updates between two chunks
            changed = torch.randint(10_500, (200,), generator=draw)
            taken.before_change(changed)
            touched += len(changed)
            weight[changed] += 1.0
            state[changed] += 1.0
        aside = sum(len(rows) for rows, _ in taken._aside)
        assert aside <= min(touched, 10_500), "a touched row is set aside once"
    assert taken._aside == []
    for name, parts in got.items():
        assert torch.equal(torch.cat(parts), wanted[name])


@pytest.mark.parametrize("servers", [2, 3])
def test_checkpoints_of_touched_rows_are_put_together(servers: int, tmp_path: Path) -> None:
    checkpoint = hp.Checkpoint(tmp_path, every=1, keep=2, every_full=4)
    stop(checkpoint, 11, sharding="row_wise")
    found = checkpoints(tmp_path)
    manifests = [json.loads((path / MANIFEST).read_text()) for path in found]
    bases = [manifest["base"] for manifest in manifests]
    assert bases[0] == "", "what the kept ones need is there"
    assert all(base == before.name for base, before in zip(bases[1:], found, strict=False))
    sizes = [sum(f.stat().st_size for f in path.glob("ps*.weight")) for path in found]
    assert sizes[-1] < sizes[0], "only touched rows are written"
    assert cli.main(["checkpoint", "verify", str(tmp_path)]) == 0
    roles = hp.Roles(trainers=2, servers=servers)
    results = hp.launch(saved.train, roles=roles, args=(checkpoint, None, True, {}))
    for got, wanted in zip(results, unbroken("adam"), strict=True):
        assert_equal(got, wanted, exactly=False)


def test_keep_is_how_many_stay(tmp_path: Path) -> None:
    stop(hp.Checkpoint(tmp_path, every=1, keep=2, wait=True), 6)
    assert [path.name for path in checkpoints(tmp_path)] == [
        "step-000000000005",
        "step-000000000006",
    ]
    assert all(path.name.startswith(("step-", ".unfinished-")) for path in tmp_path.iterdir())


def test_data_that_tell_where_they_are_are_put_there(tmp_path: Path) -> None:
    checkpoint = hp.Checkpoint(tmp_path, every=3, wait=True)
    wanted = hp.launch(
        saved.train_counting, roles=ROLES, args=(hp.Checkpoint(tmp_path / "other"), None)
    )
    with pytest.raises(hp.WorkerError, match="stopped on purpose"):
        hp.launch(saved.train_counting, roles=ROLES, args=(checkpoint, 11))
    results = hp.launch(saved.train_counting, roles=ROLES, args=(checkpoint, None))
    for (got, asked), (other, _) in zip(results, wanted, strict=True):
        assert_equal(got, other)
        assert asked == [*range(9 - BATCHES, BATCHES), *range(BATCHES)], "from batch 2 of epoch 1"


def test_hosted_modules_are_saved_with_their_optimizers(tmp_path: Path) -> None:
    checkpoint = hp.Checkpoint(tmp_path / "a", every=3, wait=True)
    wanted = hp.launch(saved.train_module, roles=ROLES, args=(hp.Checkpoint(tmp_path / "b"), None))
    with pytest.raises(hp.WorkerError, match="stopped on purpose"):
        hp.launch(saved.train_module, roles=ROLES, args=(checkpoint, 8))
    results = hp.launch(saved.train_module, roles=ROLES, args=(checkpoint, None))
    for got, other in zip(results, wanted, strict=True):
        for mine, theirs in zip(got, other, strict=True):
            for name, value in theirs.items():
                torch.testing.assert_close(mine[name], value, **CLOSE)


# -- what is refused, and what may be left behind --------------------------------------------------


def copy_of(folder: Path, to: Path) -> Path:
    subprocess.run(["cp", "-r", folder, to], check=True)
    return to


def load_error(folder: Path, options: dict[str, Any] | None = None, **arguments: Any) -> str:
    with pytest.raises(hp.WorkerError) as caught:
        hp.launch(
            saved.load, roles=hp.Roles(trainers=2), args=(str(folder), options or {}, arguments)
        )
    assert "CheckpointError" in caught.value.cause
    return caught.value.cause


@pytest.mark.parametrize("name", ["ps0.slab0.weight", "ps1.slab1.exp_avg", "model.pt"])
def test_a_flipped_bit_is_found_and_the_file_named(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = copy_of(folder, tmp_path / "copy")
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 4
    (copy / name).write_bytes(data)
    assert f"{name} is damaged: its checksum" in load_error(copy)
    assert cli.main(["checkpoint", "verify", str(copy)]) == 1
    assert name in capsys.readouterr().err


def test_a_short_or_missing_file_is_found(folder: Path, tmp_path: Path) -> None:
    copy = copy_of(folder, tmp_path / "copy")
    path = copy / "ps0.slab0.weight"
    path.write_bytes(path.read_bytes()[:-4])
    assert "ps0.slab0.weight is damaged: it has" in load_error(copy)
    path.unlink()
    assert "ps0.slab0.weight cannot be read" in load_error(copy)


def test_a_directory_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    assert f"There is no checkpoint in {tmp_path}" in load_error(tmp_path)


def test_all_differences_are_listed_at_once(folder: Path, tmp_path: Path) -> None:
    copy = copy_of(folder, tmp_path / "copy")
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["tables"]["item"]["embedding_dim"] = 9
    manifest["tables"]["user"]["num_embeddings"] = 1000
    manifest["tables"]["extra"] = manifest["tables"].pop("word")
    (copy / MANIFEST).write_text(json.dumps(manifest))
    error = load_error(copy, {"optimizer": "row_wise"})
    for words in (
        "table 'item' has embedding_dim 8, and had 9",
        "table 'user' has 23 rows, fewer than the 1000 that it had",
        "the checkpoint has no table 'word'",
        "the model has no table 'extra'",
        "table 'item' has the optimizer RowWiseAdagrad, and had Adam",
    ):
        assert words in error


def test_parts_can_be_loaded(folder: Path) -> None:
    full = unbroken("adam")[0]

    def load(**arguments: Any) -> Whole:
        return hp.launch(saved.load, roles=ROLES, args=(str(folder), {}, arguments))[1]

    fresh = hp.launch(saved.fresh, roles=ROLES)[1]
    some = load(tables=["item"], dense=False)
    assert torch.equal(some.rows["item"], full.rows["item"])
    assert torch.equal(some.state["item.exp_avg"], full.state["item.exp_avg"])
    assert torch.equal(some.rows["user"], fresh.rows["user"])
    assert torch.equal(some.dense["top.weight"], fresh.dense["top.weight"])
    assert some.step == 0
    warm = load(tables={"item": "word"}, dense=False, state=False)  # a table under another name
    assert torch.equal(warm.rows["item"][:11], full.rows["word"])
    assert torch.equal(warm.rows["item"][11:], fresh.rows["item"][11:])
    dense = load(tables=[])
    assert torch.equal(dense.dense["top.weight"], full.dense["top.weight"])
    assert torch.equal(dense.rows["item"], fresh.rows["item"])
    rows = load(state=False)
    assert torch.equal(rows.rows["item"], full.rows["item"])
    assert not rows.state["item.exp_avg"].any()


def test_a_table_that_has_grown_keeps_its_old_rows(folder: Path) -> None:
    full = unbroken("adam")[0]
    got, start = hp.launch(saved.load_grown, roles=ROLES, args=(str(folder),))[0]
    for name, rows in full.rows.items():
        assert torch.equal(got[name][: len(rows)], rows)
        assert torch.equal(got[name][len(rows) :], start[name][len(rows) :])


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 kB."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", tmp_path], capture_output=True
    )
    if made.returncode:
        pytest.skip("cannot mount a small file system here")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_full_disk_fails_the_save_and_loses_nothing(full_disk: Path) -> None:
    with pytest.raises(hp.WorkerError, match="No space left on device"):
        hp.launch(
            saved.train, roles=ROLES, args=(hp.Checkpoint(full_disk, every=1, keep=100), None,
                                            False, {}),
        )  # fmt: skip
    found = checkpoints(full_disk)
    assert found
    for path in found:
        assert cli.main(["checkpoint", "verify", str(path)]) == 0


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(hp.WorkerError, match=r"trainer0 .* cannot write the checkpoint.*file"):
        hp.launch(
            saved.train,
            roles=ROLES,
            args=(hp.Checkpoint(tmp_path / "file", every=1), None, False, {}),
        )


@pytest.mark.parametrize("wrong", [{"every": 0}, {"keep": 0}, {"every": 1.5}])
def test_a_wrong_setting_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(hp.SpecError, match=next(iter(wrong))):
        hp.Checkpoint("somewhere", **wrong)


def test_the_command_shows_what_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checkpoint", "show", str(folder.parent)]) == 0
    shown = capsys.readouterr().out
    for words in (
        f"step {TOTAL}, epoch {EPOCHS}, batch 0",
        "2 trainers and 2 servers",
        "table item: 37 rows of 8 float32, Adam, 3,552 bytes",
    ):
        assert words in shown


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_kills_while_saving_lose_nothing(tmp_path: Path) -> None:
    """Whatever moment a process is killed at, what is there is whole, and was once written."""
    wanted = hp.launch(saved.reference_rows, roles=ROLES, args=(200,))[0]
    checkpoint = hp.Checkpoint(tmp_path, every=1, keep=2)
    kills, newest = 0, 0
    for number in range(100):
        with pytest.raises(hp.WorkerError, match="SIGKILL"):
            hp.launch(saved.kill_at_random, roles=ROLES, args=(checkpoint, number))
        kills += 1
        for path in checkpoints(tmp_path):
            assert cli.main(["checkpoint", "verify", str(path)]) == 0
        if not checkpoints(tmp_path):
            continue
        step = json.loads((checkpoints(tmp_path)[-1] / MANIFEST).read_text())["step"]
        assert step >= newest, "a checkpoint was lost"
        newest = step
        if number % 10 == 9 and step in wanted:
            got = hp.launch(saved.load, roles=ROLES, args=(str(tmp_path), {}, {}))[0]
            assert got.step == step
            assert torch.equal(got.rows["item"], wanted[step])
        if newest > 150:  # begin anew, so that steps stay among those known
            for path in checkpoints(tmp_path):
                subprocess.run(["rm", "-r", path], check=True)
            newest = 0
    print(f"{kills} kills; the newest checkpoint is of step {newest}")
    assert os.listdir(tmp_path)
