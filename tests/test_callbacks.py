"""Callbacks of a loop, in real worlds: what they are told, and what those that ship write."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import hybridpar as hp
import watched
from hybridpar import callbacks
from hybridpar.callbacks.logger import Interval
from watched import SIZE, STEPS

TWO = hp.Roles(trainers=2, servers=2)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[object]]:
    """One world that is watched by everything."""
    folder = tmp_path_factory.mktemp("watched")
    return folder, hp.launch(watched.everything, roles=TWO, args=(str(folder), {"profile": True}))


def entries(path: Path, kind: str = "") -> list[dict[str, object]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [entry for entry in found if not kind or entry["record"] == kind]


def test_callbacks_change_no_result_and_see_every_loss(world: tuple[Path, list[object]]) -> None:
    expected = hp.launch(watched.plain, roles=TWO)
    for (told, *_, first, second), (losses, plain_first, plain_second) in zip(
        world[1], expected, strict=True
    ):
        assert told.losses == losses
        assert (first.epoch_losses, second.epoch_losses) == (
            plain_first.epoch_losses, plain_second.epoch_losses,
        )  # fmt: skip


def test_the_records_tell_what_happened(world: tuple[Path, list[object]]) -> None:
    folder, results = world
    for rank, (told, *_, first, _) in enumerate(results):
        kinds = [type(record).__name__ for record in told.records if type(record) is not tuple]
        saved = ["Saved"] if rank == 0 else []
        assert kinds == [
            "dict", "Run", *saved, "End", "Evaluation", "dict", "Run", *saved, *saved, "End",
        ]  # fmt: skip
        runs = [record for record in told.records if isinstance(record, callbacks.Run)]
        assert [run.step for run in runs] == [0, STEPS]
        assert [run.first_epoch for run in runs] == [0, 1]
        assert runs[0].rank == rank
        assert (runs[0].num_trainers, runs[0].num_servers, runs[0].steps_an_epoch) == (2, 2, STEPS)
        assert {table.name: table.num_embeddings for table in runs[0].tables} == {
            "item": 37, "user": 23, "word": 11,
        }  # fmt: skip
        assert sum(t.num_bytes for t in runs[0].tables) == sum(s.num_bytes for s in runs[0].servers)
        assert told.records[0] == {"dense": 0.1, "sparse": 0.1}
        steps = [record for record in told.records if type(record) is tuple]
        assert [step[:6] for step in steps] == [
            (n + 1, n // STEPS, n % STEPS + 1, STEPS, SIZE, 2) for n in range(2 * STEPS)
        ]
        assert all(0 <= waiting <= seconds for *_, seconds, waiting in steps)
        end = next(record for record in told.records if isinstance(record, callbacks.End))
        assert (end.step, end.steps, end.samples) == (STEPS, STEPS, STEPS * SIZE)
        assert end.epoch_losses == first.epoch_losses
        assert 0 < end.waiting < end.seconds
        assert end.profile is not None
        assert end.profile.trainer == first.profile.trainer
    saved = [r for r in results[0][0].records if isinstance(r, callbacks.Saved)]
    assert [each.step for each in saved] == [8, 16, 24]
    assert all(each.path.parent == folder / "checkpoints" for each in saved)
    files = [path for path in saved[-1].path.iterdir() if path.name != "manifest.json"]
    assert saved[-1].num_bytes == sum(path.stat().st_size for path in files)


def test_monitors_measure_what_a_step_used(world: tuple[Path, list[object]]) -> None:
    steps = entries(world[0] / "run.jsonl", "step")
    assert [e["metrics"]["lr/dense"] for e in steps] == [0.1 * 0.5**n for n in range(2 * STEPS)]
    assert {e["metrics"]["lr/sparse"] for e in steps} == {0.1}
    assert {e["metrics"]["staleness/item"] for e in steps} == {0}
    assert world[1][0][0].metrics == steps[-1]["metrics"]
    assert world[1][1][0].metrics == {}, "monitors are on trainer 0 alone"


def test_jsonl_holds_the_whole_run(world: tuple[Path, list[object]]) -> None:
    found = entries(world[0] / "run.jsonl")
    kinds = [entry["record"] for entry in found]
    assert kinds.count("start") == kinds.count("end") == 2
    assert kinds.count("step") == 2 * STEPS
    assert [entry["loss"] for entry in found if entry["record"] == "step"] == world[1][0][0].losses
    assert found[0]["format"] == 1
    assert found[0]["settings"]["dense optimizer"] == "SGD(lr=0.1)"
    assert found[0]["tables"][0]["optimizer"] == "SGD(lr=0.1)"


def test_csv_has_a_column_for_each_name(world: tuple[Path, list[object]]) -> None:
    with (world[0] / "run.csv").open(newline="") as file:
        every = list(csv.DictReader(file))
    (evaluation,) = [row for row in every if row["auc"]]
    assert (evaluation["step"], evaluation["auc"], evaluation["loss"]) == ("12", "0.75", "")
    rows = [row for row in every if row["loss"]]
    assert [int(row["step"]) for row in rows] == [5, 10, 12, 15, 20, 24]
    losses = world[1][0][0].losses
    assert [float(row["loss"]) for row in rows] == [losses[int(row["step"]) - 1] for row in rows]
    assert [int(row["samples"]) for row in rows] == [5 * SIZE, 5 * SIZE, 2 * SIZE, 3 * SIZE,
                                                     5 * SIZE, 4 * SIZE]  # fmt: skip
    assert float(rows[0]["lr/dense"]) == 0.1 * 0.5**4


def test_csv_takes_in_a_name_that_comes_late(tmp_path: Path) -> None:
    log = callbacks.CSV(tmp_path / "new" / "run.csv")
    run = callbacks.Run(rank=0, num_trainers=1, num_servers=1)
    log.on_start(run)
    log.on_evaluation(callbacks.Evaluation(step=1, epoch=0, results={"auc": 0.5}))
    log.on_evaluation(callbacks.Evaluation(step=2, epoch=0, results={"loss, of all": 0.25}))
    end = callbacks.End(step=2, steps=2, skipped=0, samples=0, seconds=1.0, waiting=0.0)
    log.on_end(end)
    again = callbacks.CSV(tmp_path / "new" / "run.csv")
    again.on_start(callbacks.Run(rank=0, num_trainers=1, num_servers=1, step=2))
    again.on_evaluation(callbacks.Evaluation(step=3, epoch=0, results={"auc": 0.75}))
    again.on_end(end)
    assert (tmp_path / "new" / "run.csv").read_text().splitlines() == [
        'step,epoch,time,auc,"loss, of all"', "1,0,0.0,0.5,", "2,0,0.0,,0.25", "3,0,0.0,0.75,",
    ]  # fmt: skip


def test_tensorboard_reads_what_was_written(world: tuple[Path, list[object]]) -> None:
    events = EventAccumulator(str(world[0] / "events")).Reload()
    scalars = events.Scalars("loss")
    losses = world[1][0][0].losses
    assert [(e.step, round(e.value, 5)) for e in scalars] == [
        (step, round(losses[step - 1], 5)) for step in (4, 8, 12, 16, 20, 24)
    ]
    wanted = {"lr/dense", "samples_per_second", "waiting", "evaluation/auc"}
    assert wanted <= set(events.Tags()["scalars"])


def test_prometheus_reads_what_is_served(world: tuple[Path, list[object]]) -> None:
    _, text, kind, closed, _, _ = world[1][0]
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    assert closed, "nobody listens after the end"
    values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = re.fullmatch(r'([a-z_]+(?:\{[a-z_]+="[^{}]*"\})?) (\S+)', line).groups()
            values[name] = float(value)
            assert f"# TYPE {name.partition('{')[0]} " in text or "staleness_steps" in name
    assert values["hybridpar_step"] == 5
    assert values["hybridpar_samples_total"] == 5 * SIZE
    assert values["hybridpar_loss"] == pytest.approx(world[1][0][0].losses[4])
    assert values['hybridpar_metric{name="lr/sparse"}'] == 0.1
    assert values['hybridpar_server_rows_total{server="ps0"}'] > 0


def test_what_crosses_is_counted() -> None:
    names = ("rows", "row_bytes", "gradient_bytes", "sent_bytes", "received_bytes")
    shared, sent = (
        {name: sum(getattr(server, name) for server in ends[0].servers) for name in names}
        for share in (True, False)
        for ends in [hp.RoleLauncher(TWO, share_memory=share).run(watched.told_alone)]
    )
    rows = sum(b.items.numel() + b.users.numel() + b.words.numel() for b in watched.batches(0))
    assert shared["rows"] == sent["rows"] == rows
    assert shared["row_bytes"] == shared["gradient_bytes"] == sent["row_bytes"]
    assert sent["sent_bytes"] > sent["gradient_bytes"] == shared["gradient_bytes"]
    assert sent["received_bytes"] > sent["row_bytes"]
    assert shared["received_bytes"] < sent["received_bytes"] - sent["row_bytes"] / 2


@pytest.mark.parametrize("where", ["on_start", "on_step", "measure", "on_end"])
def test_a_callback_that_raises_is_named(where: str, tmp_path: Path) -> None:
    with pytest.raises(hp.WorkerError) as caught:
        hp.launch(watched.raising, roles=TWO, args=(where, str(tmp_path)))
    error = caught.value
    assert (error.role, error.rank) == ("trainer", 0)
    assert f"CallbackError: Raises.{where} raised ZeroDivisionError: my callback" in error.cause
    assert "in _raise" in error.remote_traceback
    assert "my callback" in (tmp_path / "heard0").read_text(), "another one can close its files"


def test_the_end_tells_of_the_steps_that_a_trainer_took() -> None:
    assert hp.launch(watched.uneven, roles=TWO) == [(3, 3, 5), (5, 5, 5)]


def test_callbacks_hear_of_a_failure_which_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(hp.WorkerError, match="ZeroDivisionError: the data are bad") as caught:
        hp.launch(watched.failing, roles=TWO, args=(str(tmp_path), False))
    assert (caught.value.rank, caught.value.step) == (1, 4)
    heard = (tmp_path / "heard1").read_text()
    assert heard == "ZeroDivisionError('the data are bad') after 4 steps"
    assert "after 4 steps" in (tmp_path / "heard0").read_text(), "the other one hears, too"
    last = entries(tmp_path / "run.jsonl")[-1]
    assert (last["record"], last["steps"]) == ("failure", 4)
    assert 'class="bad"' in (tmp_path / "run.html").read_text()


@pytest.mark.parametrize(("how", "wanted"), [("rule", [10, 10, 5]), ("own", [70, 70, 35])])
def test_samples_of_a_step(how: str, wanted: list[int]) -> None:
    assert hp.launch(watched.counted, roles={"trainer": 1, "ps": 1}, args=(how,)) == [wanted]


def test_a_restarted_run_goes_on_in_its_files(tmp_path: Path) -> None:
    results = hp.launch(watched.resumed, roles=TWO, args=(str(tmp_path),), max_restarts=1)
    assert results == [4, 4]
    kinds = [entry["record"] for entry in entries(tmp_path / "run.jsonl")]
    assert kinds.count("start") == 2
    assert [kinds.count("failure"), kinds.count("end")] == [1, 1]
    with (tmp_path / "run.csv").open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps[-4:] == [9, 10, 11, 12]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: callbacks.JSONL("x", every=0), "JSONL got every=0"),
        (lambda: callbacks.Prometheus(port=-1), "port=-1"),
        (lambda: callbacks.ProgressBar(line_every_s=0), "line_every_s=0"),
    ],
)
def test_settings_that_are_refused(make, message: str) -> None:
    with pytest.raises(hp.SpecError, match=message):
        make()


def test_a_port_that_is_taken_is_refused() -> None:
    run = callbacks.Run(rank=0, num_trainers=1, num_servers=1)
    first = callbacks.Prometheus()
    first.on_start(run)
    second = callbacks.Prometheus(int(first.url.split(":")[2].split("/")[0]))
    with pytest.raises(hp.SpecError, match="cannot listen at 127"):
        second.on_start(run)
    end = callbacks.End(step=0, steps=0, skipped=0, samples=0, seconds=0.0, waiting=0.0)
    first.on_end(end)


@pytest.mark.parametrize("make", [callbacks.JSONL, callbacks.CSV])
def test_a_line_that_was_cut_short_is_dropped_when_the_file_goes_on(make, tmp_path: Path) -> None:
    path = tmp_path / "log"
    run = callbacks.Run(rank=0, num_trainers=1, num_servers=1)
    end = callbacks.End(step=0, steps=0, skipped=0, samples=0, seconds=0.0, waiting=0.0)
    for step in (0, 1):
        log = make(path)
        log.on_start(replace(run, step=step))
        log.on_step(some_step(step + 1))
        log.on_end(end)
        if not step:
            whole = path.read_bytes()
            path.write_bytes(whole + whole[: len(whole) // 3 * 2].rpartition(b"\n")[2])
            assert path.read_bytes() != whole
    assert path.read_bytes().startswith(whole)
    if make is callbacks.JSONL:
        assert [entry["step"] for entry in entries(path, "step")] == [1, 2]
    else:
        with path.open(newline="") as file:
            assert [row["step"] for row in csv.DictReader(file)] == ["1", "2"]


def some_step(number: int, **more: object) -> callbacks.Step:
    return callbacks.Step(
        step=number, epoch=0, step_in_epoch=number, steps_an_epoch=None, num_trainers=1,
        loss_tensor=torch.tensor(0.5), samples=4, seconds=0.1, waiting=0.0, **more,
    )  # fmt: skip


def test_what_a_scrape_shows_was_measured_in_the_training_thread() -> None:
    threads = []
    endpoint = callbacks.Prometheus()
    endpoint.on_step(some_step(1, _measure=lambda _: {"thread": threads.append(1) or 1.0}))
    assert threads == [1]
    assert 'hybridpar_metric{name="thread"} 1' in endpoint.text()
    assert threads == [1]


def test_a_page_that_cannot_be_written_is_told_of_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        callbacks.Report(tmp_path).on_start(callbacks.Run(rank=0, num_trainers=1, num_servers=1))


def test_rates_of_an_interval() -> None:
    interval = Interval()
    assert (interval.samples_per_second, interval.waiting_share) == (0.0, 0.0)
