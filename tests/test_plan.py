"""The plan tells what a job then holds and sends; and it can be asked for in many ways."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridpar as hp
import planned
from hybridpar import cli
from hybridpar.planning import calibration
from hybridpar.planning.sources import optimizer_of
from hybridpar.report.planned import planned_traffic
from hybridpar.wording import size


@pytest.fixture(autouse=True)
def _calibrates_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "BUDGET_S", 0.01)


def planned_report(case: planned.Case, servers: int) -> hp.PlanReport:
    return hp.plan(
        planned.Model(case),
        trainers=planned.TRAINERS,
        servers=servers,
        optimizer=case.optimizer,
        batches=lambda rank: planned.batches_of(case, rank),
        **dict(case.settings),
    )


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_a_real_job_holds_and_sends_what_was_planned(servers: int) -> None:
    """Bytes held are equal; bytes on the wire are nearly so, by the kernel's own count."""
    roles = hp.Roles(trainers=planned.TRAINERS, servers=servers)
    results = hp.RoleLauncher(roles, share_memory=False).run(planned.run_all)
    for number, case in enumerate(planned.CASES):
        report = planned_report(case, servers)
        of_trainers = [result[number] for result in results]
        for server in report.servers:
            held = of_trainers[0].held.get(server.rank, 0)
            assert held == server.num_bytes, (case, server)
            for what, wanted in (
                ("sent", server.received_a_step),
                ("received", server.sent_a_step),
            ):
                real = sum(getattr(one, what)[server.rank] for one in of_trainers) / planned.STEPS
                assert wanted == pytest.approx(real, rel=0.01, abs=16), (case, server.rank, what)


def test_the_page_on_a_run_has_what_was_planned_beside_what_was_measured(tmp_path: Path) -> None:
    roles = hp.Roles(trainers=planned.TRAINERS, servers=2)
    plan = hp.plan(
        planned.Model(planned.Case("row_wise")), trainers=planned.TRAINERS, servers=2,
        optimizer=planned.ADAGRAD, batches=planned.many_ids,
    ).to_dict()  # fmt: skip
    path = tmp_path / "run.html"
    measured = hp.launch(planned.beside, roles=roles, args=(str(path), plan), device="cpu")
    start = {"num_trainers": planned.TRAINERS, "num_servers": 2}
    for server, (rows, num_bytes) in planned_traffic(plan, start).items():
        assert rows == sum(each[server][0] for each in measured) / 2
        assert num_bytes == pytest.approx(sum(each[server][1] for each in measured) / 2, rel=0.05)
    assert path.read_text().count(">planned</th>") == 2
    with pytest.raises(hp.SpecError, match="for 2 trainers and 2 servers, and the run has 3 and 2"):
        planned_traffic(plan, {**start, "num_trainers": 3})
    with pytest.raises(hp.SpecError, match="The plan is none"):
        planned_traffic({}, start)


def test_a_plan_leaves_the_model_and_the_generator_as_they_were() -> None:
    model = planned.Model(planned.CASES[0])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    model.eval()
    hp.plan(model, optimizer=hp.optim.SGD(lr=0.1), batches=planned.batches_of(planned.CASES[0], 0))
    assert torch.equal(torch.rand(3), wanted)
    assert not model.training
    assert model.top.weight.grad is None
    assert model._tables is None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


ITEM = hp.RemoteEmbeddingSpec("item", num_embeddings=1000, embedding_dim=64, mode="sum")


def test_counts_of_a_sample() -> None:
    ids = torch.tensor([7] * 50 + list(range(100, 150)))
    report = hp.plan(
        ITEM,
        trainers=4,
        servers=2,
        optimizer=hp.optim.Adagrad(lr=0.1),
        batches=[{"item": (ids, torch.arange(0, 100, 10))}],
    )
    (table,) = report.tables
    assert table.ids_a_step == 400
    assert table.pooling_factor == 10
    assert table.unique_share == 0.51
    assert table.top_share == 0.5
    assert [server.ids_a_step for server in report.servers] == [4 * 25, 4 * 75]
    assert [server.rows_a_step for server in report.servers] == [25, 26]
    assert report.skew == 1.5
    assert table.why == (
        "spread: 100% of all bytes, above a server's fair 50%; 520 bytes a sample by rows, 528 by "
        "columns"
    )


def test_a_cluster_far_larger_than_this_machine() -> None:
    """Nothing of a table's size is allocated, and no process started."""
    specs = [
        hp.RemoteEmbeddingSpec(f"t{n}", num_embeddings=10**9, embedding_dim=128) for n in range(8)
    ]
    report = hp.plan(
        specs, trainers=64, servers=16, optimizer=hp.optim.Adam(lr=0.1), steps=2,
        batches=[{spec.name: torch.randint(10**9, (128,)) for spec in specs}],
        memory_bytes=512 << 30,
    )  # fmt: skip
    assert sum(server.num_bytes for server in report.servers) == 8 * 10**9 * 128 * 12
    assert report.bottleneck == "memory"
    assert "may take 549,755,813,888" in report.why


@pytest.mark.parametrize(
    ("more", "bottleneck"),
    [({"gbit": 1e-3}, "network"), ({"gbit": 1e6}, "servers|trainers"), ({"batches": None}, "None")],
)
def test_the_bottleneck(more: dict[str, Any], bottleneck: str) -> None:
    batches = [{"item": torch.randint(1000, (512, 10))}]
    report = hp.plan(
        ITEM, **{"optimizer": hp.optim.SGD(lr=0.1), "batches": batches, "trainers": 2} | more
    )
    assert str(report.bottleneck) in bottleneck.split("|")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"trainers": 0}, "trainers is 0"),
        ({"servers": 1.5}, "servers is 1.5"),
        ({"gbit": -1}, "gbit is -1"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"optimizer": None}, "has no optimizer"),
        ({"consistency": "bounded"}, "staleness=None"),
        ({"batches": []}, "no batch for trainer0"),
        ({"batches": [{"item": torch.tensor([1000])}]}, "got id 1000"),
        ({"batches": [{"itme": torch.tensor([1])}]}, "no spec names"),
    ],
)
def test_what_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(hp.HybridParError, match=message):
        hp.plan(ITEM, **{"optimizer": hp.optim.SGD(lr=0.1)} | more)
    with pytest.raises(hp.SpecError, match="plan got 3"):
        hp.plan(3)  # type: ignore[arg-type]


PYTHON = """
import torch
import hybridpar as hp

item = hp.RemoteEmbeddingSpec("item", num_embeddings=1000, embedding_dim=8, mode="sum")

class Net(hp.HybridModel):
    def __init__(self):
        super().__init__(item)
        self.top = torch.nn.Linear(8, 2)
    def sparse_inputs(self, batch):
        return {"item": batch}
    def forward(self, embeddings, batch):
        return self.top(embeddings["item"])

def some():
    return [item]

def of_rank(rank):
    return [torch.full((4, 2), rank)]

ids = [{"item": torch.arange(6).view(3, 2)}]
"""
JSON = {
    "tables": [
        {"name": "item", "num_embeddings": 1000, "embedding_dim": 8, "mode": "sum"},
        {
            "name": "user", "num_embeddings": 50, "embedding_dim": 4, "dtype": "float16",
            "optimizer": "Adam(lr=0.01)", "pooling_factor": 3.0,
        },
    ],
    "optimizer": "RowWiseAdagrad",
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    (tmp_path / "planned_net.py").write_text(PYTHON)
    (tmp_path / "specs.json").write_text(json.dumps(JSON))
    batch = {"item": {"ids": [1, 2, 2], "offsets": [0, 1]}, "user": [3, 4]}
    (tmp_path / "sample.json").write_text(json.dumps([batch, batch]))
    torch.save({"item": (torch.tensor([1, 2, 2]), torch.tensor([0, 1]))}, tmp_path / "sample.pt")
    yield tmp_path
    sys.modules.pop("planned_net", None)


@pytest.mark.parametrize(
    ("arguments", "num_bytes", "ids"),
    [
        (["planned_net.py"], 32_000, None),
        (["planned_net.py:Net", "--optimizer", "Adagrad"], 64_000, None),
        (["planned_net.py:item"], 32_000, None),
        (["planned_net.py:some", "--batches", "ids", "--trainers", "3"], 32_000, 18),
        (["planned_net.py", "--batches", "of_rank"], 32_000, 8),
        (["planned_net.py", "--batches", "planned_net.py:of_rank"], 32_000, 8),
        (["planned_net.py", "--batches", "sample.pt"], 32_000, 3),
        (["planned_net.py", "--batch-size", "10"], 32_000, 10),
        (["specs.json"], 36_000 + 50 * (8 + 32), None),
        (["specs.json", "--batches", "sample.json", "--servers", "2"], 38_000, 5),
        (["specs.json", "--batch-size", "7", "--consistency", "async"], 38_000, 28),
        (["specs.json", "--optimizer", "SGD(momentum=0.9)"], 64_000 + 2_000, None),
    ],
)
def test_what_the_command_reads(
    files: Path, arguments: list[str], num_bytes: int, ids: int | None,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert cli.main(["plan", *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert sum(server["num_bytes"] for server in report["servers"]) == num_bytes
    if ids is not None:
        assert sum(server["ids_a_step"] for server in report["servers"]) == ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.py"], "There is no file gone.py"),
        (["planned_net.py:gone"], "planned_net.py has no 'gone'"),
        (["planned_net.py:ids"], "Name a HybridModel"),
        (["planned_net.py:of_rank"], "needs the arguments rank"),
        (["planned_net.py", "--optimizer", "Adamm"], "no optimizer 'Adamm'"),
        (["planned_net.py", "--optimizer", "Adam(lr=x)"], "cannot be built"),
        (["planned_net.py", "--optimizer", "Adam(lr=-1)"], "lr=-1"),
        (["bad.json"], "not of the form"),
        (["planned_net.py", "--batches", "bad.json"], "bad.json has no batches of ids"),
        (["planned_net.py", "--batches", "junk.json"], "junk.json has no batches of ids"),
        (["planned_net.py", "--batches", "junk.pt"], "junk.pt has no batches of ids"),
        (["specs.json", "--batches", "some"], "the model is in specs.json"),
    ],
)
def test_what_the_command_refuses(
    files: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "bad.json").write_text('{"tables": [{"rows": 3}]}')
    for name in ("junk.json", "junk.pt"):
        (files / name).write_text("junk")
    assert cli.main(["plan", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_the_table_on_the_terminal(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "planned_net.py", "--batches", "of_rank", "--servers", "2"]) == 0
    out, err = capsys.readouterr()
    assert "SGD is assumed" in err
    assert "table  sharding  on       bytes  ids/step  ids/bag  unique  top 1 %\n" in out
    assert "item   row_wise  ps0 ps1  32 kB         8        2   12.5%   100.0%\n" in out
    assert "\nbottleneck: " in out


def test_sizes_and_optimizers_in_words() -> None:
    sizes = [size(n) for n in (0, 999, 1000, 123_456_789)]
    assert sizes == ["0 B", "999 B", "1 kB", "123 MB"]
    assert optimizer_of("SGD(momentum=0.9, nesterov=True)") == hp.optim.SGD(
        momentum=0.9, nesterov=True, lr=1e-3
    )


def test_the_commands_of_the_page_on_planning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each runs on the file that the page shows, and the first prints what the page says."""
    page = (Path(__file__).parents[1] / "docs" / "planning.md").read_text()
    (block,) = re.findall(r"^```python\n(# shop\.py\n.*?)^```", page, re.S | re.M)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    Path("shop.py").write_text(block)
    (specs,) = re.findall(r"^```json\n(.*?)^```", page, re.S | re.M)
    Path("shop.json").write_text(specs)
    commands = re.findall(r"^    hybridpar (plan shop.*)$", page, re.M)
    assert len(commands) == 2
    printed = []
    for command in [*commands, "plan shop.json --servers 2"]:
        assert cli.main(shlex.split(command)) == 0
        printed.append(capsys.readouterr().out)
    sys.modules.pop("shop")
    for line in printed[0].splitlines()[2:8]:  # without what is timed
        assert line.strip() in page, line
