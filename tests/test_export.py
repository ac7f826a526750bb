"""Handing a model over: exports of every kind, and a plain model's state taken and given back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import handed
import hybridpar as hp
import reference
from hybridpar.trainer.handing_over import exported_table
from worlds import batches_of

CLOSE = {"atol": 1e-6, "rtol": 1e-6}
Given = list[tuple[handed.Features, dict[str, Tensor], Tensor, Tensor]]


@pytest.fixture(scope="module", params=["sync", "async"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one world left its exports, and what the hybrid model gave."""
    to = tmp_path_factory.mktemp(request.param)
    roles = hp.Roles(trainers=2, servers=2)
    hp.launch(handed.train_every, roles=roles, args=(request.param, str(to)))
    return to


def load(folder: Path, name: str) -> Any:
    return torch.load(folder / f"{name}.pt", weights_only=False)


def given(folder: Path) -> Given:
    found: Given = load(folder, "given")
    return found


def as_flat(value: Tensor) -> Tensor:
    return value.values() if value.is_nested else value


@torch.no_grad()
def assert_alike(exported: hp.ExportedModel, folder: Path, only: tuple[str, ...] = ()) -> None:
    for batch, found, output, _ in given(folder):
        mine = exported.embeddings(batch)
        for name in only or found:
            message = f"feature {name}: "
            torch.testing.assert_close(
                as_flat(mine[name]), as_flat(found[name]), **CLOSE, msg=lambda m, n=message: n + m
            )
        if not only:
            torch.testing.assert_close(exported(batch), output, **CLOSE)


@pytest.mark.parametrize("name", ["whole", "mapped"])
def test_same_outputs(folder: Path, name: str) -> None:
    exported = load(folder, name)
    assert not exported.training
    assert_alike(exported, folder)


def test_tables_are_ordinary_modules(folder: Path) -> None:
    exported = load(folder, "whole")
    assert type(exported.tables["sum"].rows) is nn.EmbeddingBag
    assert type(exported.tables["rows.a"].rows) is nn.Embedding
    assert type(exported.tables["tower"]) is handed.Tower
    batch, found, _, _ = given(folder)[0]
    rows = exported.tables["sum"].rows(*batch["sum"])
    torch.testing.assert_close(rows, found["sum"], **CLOSE)
    names = {name for name, _ in exported.named_parameters()}
    assert {"tables.type_.rows.weight", "tables.rows_a.rows.weight", "model.top.bias"} <= names
    again = load(folder, "half")
    again.load_state_dict(exported.state_dict())  # its tables are float16, so it rounds
    with pytest.raises(hp.HybridParError, match="has no tables yet"):
        exported.model.rows("sum")


SCORE = """
import sys
from pathlib import Path
import torch

folder, name = Path(sys.argv[1]), sys.argv[2]
exported = torch.load(folder / f"{name}.pt", weights_only=False)
with torch.no_grad():
    for batch, _, output, _ in torch.load(folder / "given.pt", weights_only=False):
        torch.testing.assert_close(exported(batch), output, atol=1e-6, rtol=1e-6)
print("alike")
"""


@pytest.mark.parametrize("name", ["whole", "mapped"])
def test_a_fresh_process_scores(folder: Path, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:Failed to initialize NumPy", "-c", SCORE,
         str(folder), name],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == ("alike", 0), done.stderr


def test_mapped_tables_are_not_in_the_file_and_may_move(folder: Path, tmp_path: Path) -> None:
    exported = load(folder, "mapped")
    assert not [name for name, _ in exported.named_parameters() if name.startswith("tables.sum")]
    before = exported.tables["sum"].weight.clone()
    shutil.copytree(folder / "tables", tmp_path / "moved")
    for path in (tmp_path / "moved").glob("*-mean.rows"):
        path.write_bytes(b"short")
    exported = load(folder, "mapped")
    exported.move_tables(tmp_path / "moved")
    torch.testing.assert_close(exported.tables["sum"].weight, before, **CLOSE)
    with pytest.raises(hp.CheckpointError, match="has 5 bytes, and should have 464"):
        exported.tables["mean"].weight  # noqa: B018 - reading it maps it
    exported.move_tables(tmp_path / "nowhere")
    with pytest.raises(hp.CheckpointError, match="is not there, and should have 464 bytes"):
        exported(given(folder)[0][0])
    assert not list((folder / "tables").glob("*.part"))


def test_only_some_tables(folder: Path) -> None:
    exported = load(folder, "some")
    assert_alike(exported, folder, only=("sum", "one", "weighted", "rows", "ragged"))
    assert "mean" not in exported.embeddings(given(folder)[0][0])
    assert "mean" not in exported.tables


def test_a_forward_that_needs_a_table_left_out() -> None:
    model = hp.ExportedModel(NeedsBoth(), NeedsBoth().specs, {})
    with pytest.raises(hp.InputError, match="needs feature 'a', whose table 'a' was not exported"):
        model(torch.tensor([1]))


class NeedsBoth(hp.HybridModel[Tensor]):
    def __init__(self) -> None:
        super().__init__(hp.RemoteEmbeddingSpec("a", num_embeddings=3, embedding_dim=2))

    def sparse_inputs(self, batch: Tensor) -> dict[str, Tensor]:
        return {"a": batch}

    def forward(self, embeddings: dict[str, Tensor], batch: Tensor) -> Tensor:
        return embeddings["a"]


@torch.no_grad()
def test_half_precision(folder: Path) -> None:
    exported = load(folder, "half")
    assert exported.tables["sum"].weight.dtype == torch.float16
    for batch, found, _, _ in given(folder):
        mine = exported.embeddings(batch)
        assert mine["sum"].dtype == torch.float32
        torch.testing.assert_close(mine["sum"], found["sum"], atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(mine["half max"], found["half max"], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", ["kept", "kept_mapped"])
def test_only_some_rows(folder: Path, name: str) -> None:
    exported, rows = load(folder, name), load(folder, "rows")
    assert exported.tables["half"].weight.shape == (len(handed.KEPT) + 2, handed.DIM)  # padding too
    for table in ("sum", "half", "rows.a"):
        padding = {"sum": 0, "half": 1, "rows.a": 1}[table]
        keep = torch.zeros(handed.ROWS, dtype=torch.bool)
        keep[handed.KEPT] = True
        expected = rows[table] * keep.unsqueeze(1)
        feature = "rows1" if table == "rows.a" else table
        ids = torch.arange(handed.ROWS)
        found = exported.tables[table](feature, ids)
        torch.testing.assert_close(found, expected, **CLOSE)
        assert found[padding].count_nonzero() == 0
        unknown = exported.tables[table](feature, torch.tensor([handed.ROWS, 10**12]))
        assert unknown.count_nonzero() == 0


def test_bad_batches_are_refused_as_in_training(folder: Path) -> None:
    exported = load(folder, "whole")
    with pytest.raises(hp.InputError, match="Feature 'one' on the exported model got id 29"):
        exported.embeddings({"one": torch.tensor([29])})
    with pytest.raises(hp.InputError, match="feature 'two', which no spec names"):
        exported.embeddings({"two": torch.tensor([29])})


@torch.no_grad()
@pytest.mark.parametrize("name", ["whole", "mapped"])
def test_torch_export(folder: Path, name: str) -> None:
    exported = load(folder, name)
    batch, _, _, output = given(folder)[0]
    program = torch.export.export(exported, (handed.traced(batch),))
    torch.testing.assert_close(program.module()(handed.traced(batch)), output, **CLOSE)


def of_any_size(folder: Path) -> torch.export.ExportedProgram:
    small = handed.traced(given(folder)[0][0])
    sizes = torch.utils._pytree.tree_map(lambda _: {0: torch.export.Dim.AUTO}, small)
    return torch.export.export(load(folder, "whole"), (small,), dynamic_shapes=(sizes,))


@torch.no_grad()
def test_torch_export_takes_batches_of_any_size(folder: Path) -> None:
    program = of_any_size(folder).module()
    for batch, _, _, output in given(folder):
        torch.testing.assert_close(program(handed.traced(batch)), output, **CLOSE)


@torch.no_grad()
def test_torch_export_with_only_some_rows(folder: Path) -> None:
    exported = load(folder, "kept")
    for batch, _, _, _ in given(folder)[:1]:
        small = handed.traced(batch)
        program = torch.export.export(exported, (small,)).module()
        torch.testing.assert_close(program(small), exported(small), **CLOSE)


@pytest.mark.filterwarnings("ignore")  # those of other packages
def test_onnx(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(pytest.importorskip("tqdm").tqdm, "monitor_interval", 0)  # no thread
    run_of = pytest.importorskip("onnx.reference").ReferenceEvaluator
    path = tmp_path / "model.onnx"
    torch.onnx.export(of_any_size(folder), f=str(path), dynamo=True, verbose=False)
    run = run_of(str(path))
    for batch, _, _, output in given(folder):
        flat = torch.utils._pytree.tree_leaves(handed.traced(batch))
        inputs = {name: v.numpy() for name, v in zip(run.input_names, flat, strict=True)}
        (result,) = run.run(None, inputs)
        torch.testing.assert_close(torch.from_numpy(result), output, **CLOSE)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 1000])
def test_a_binary_search(count: int) -> None:
    ordered = torch.arange(count) * 3 + 5
    values = torch.arange(3 * count + 12).view(3, -1)
    expected = (torch.searchsorted(ordered, values, right=True) - 1).clamp(min=0)
    assert torch.equal(exported_table._last_not_above(ordered, values), expected)


def test_an_exported_model_trains_on(folder: Path) -> None:
    exported = load(folder, "whole").train()
    exported(given(folder)[0][0]).sum().backward()
    for parameter in exported.parameters():
        assert parameter.grad is not None
    for table, padding in (("sum", 0), ("rows.a", 1), ("half", 1)):
        grad = exported.tables[table].rows.weight.grad
        assert grad.count_nonzero() > 0
        assert grad[padding].count_nonzero() == 0


def test_a_large_table_never_is_in_one_process_whole(tmp_path: Path) -> None:
    rows = 1_600_000  # 410 MB
    ((grown, right),) = hp.launch(
        handed.memory_of_an_export,
        roles=hp.Roles(trainers=1, servers=2),
        args=(rows, str(tmp_path)),
    )
    assert right
    assert grown < 100 << 20, f"grew by {grown >> 20} MiB"


def test_refused() -> None:
    (messages,) = hp.launch(handed.refused_exports, roles=hp.Roles(trainers=1, servers=1))
    for message, wanted in zip(
        messages,
        [
            "SpecError: No table is named 'nothing'",
            "SpecError: export got tables='sum'. Give a list of names",
            "SpecError: export got dtype=torch.int64. Give one of torch.float32",
            "SpecError: export got rows of 'tower', which is a module",
            "InputError: export got rows of table 'sum' whose ids are none, or not within 0 to 28",
            "SpecError: export got rows of table 'sum', which tables= leaves out",
            "SpecError: Every holds something that cannot be copied",
        ],
        strict=True,
    ):
        assert message.startswith(wanted)


# -- from a plain model, and back ------------------------------------------------------------------


def plain_model() -> reference.Plain:
    plain = reference.Plain("sum")
    torch.manual_seed(77)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    return plain


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
def test_filled_from_a_plain_model_and_given_back(sharding: str) -> None:
    trainers, steps, plain = 2, 3, plain_model()
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    results = hp.launch(
        handed.fill_and_train, roles=hp.Roles(trainers=trainers, servers=2),
        args=(state, sharding, steps),
    )  # fmt: skip
    sparse = torch.optim.SGD(plain.tables.parameters(), lr=0.1)
    dense = torch.optim.SGD(plain.top.parameters(), lr=0.1, momentum=0.5)
    for batches in zip(*(batches_of(r, steps, bags=True) for r in range(trainers)), strict=True):
        sparse.zero_grad()
        dense.zero_grad()
        for batch in batches:
            (F.cross_entropy(plain(batch), batch.label) / trainers).backward()
        sparse.step()
        dense.step()
    for back, _ in results:
        again = reference.Plain("sum")
        again.load_state_dict(back)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(back[name], value, **CLOSE)
    left_over, many = results[0][1]
    assert left_over.startswith("SpecError: The plain state does not fit the model")
    assert "nothing takes 'more' of the state" in left_over
    for line in (
        "parameter 'top.bias' has shape (3,), and in the state (1,)",
        "the state has no 'top.weight', which the dense half has",
        "table 'item' has shape (37, 8), and in the state (2, 3)",
        "the state has no 'u', given for table 'user'",
        "the model has no table 'nothing'",
        "tables= names no key for 'word'",
    ):
        assert line in many


def test_a_hosted_module_is_filled_and_its_optimizer_begins_anew() -> None:
    torch.manual_seed(9)
    plain = nn.ModuleDict({"side": handed.Tower(), "top": nn.Linear(handed.DIM, 2)})
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    results = hp.launch(handed.fill_module, roles=hp.Roles(trainers=2, servers=1), args=(state,))
    optimizer = torch.optim.Adagrad(plain["side"].parameters())
    batch = handed.make(2)
    output = plain["top"](plain["side"](*batch["tower"]))
    F.mse_loss(output, batch["label"]).backward()
    optimizer.step()
    for filled, trained, messages in results:
        for name, value in state.items():
            torch.testing.assert_close(filled[name], value, **CLOSE)
        for name in ("side.linear.weight", "side.norm.weight"):
            torch.testing.assert_close(trained[name], plain.state_dict()[name], **CLOSE)
        assert "the state has no 'side.linear.bias', which module 'tower' has" in messages[0]
