"""Models and train functions of test_export and test_set_rows. Imports no test tool."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hybridpar as hp
from hybridpar.trainer.handing_over import export, row_writes
from worlds import Model, batches_of, dense_sgd

ROWS, DIM, SIZE = 29, 4, 6
Features = dict[str, Any]


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, DIM)
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, values: Tensor, more: Tensor) -> Tensor:
        return self.norm(self.linear(values)) + more.unsqueeze(1)


def spec(name: str, **more: Any) -> hp.RemoteEmbeddingSpec:
    return hp.RemoteEmbeddingSpec(name, num_embeddings=ROWS, embedding_dim=DIM, seed=3, **more)


class Every(hp.HybridModel[Features]):
    """Every way to look up. A feature may be left out."""

    def __init__(self) -> None:
        super().__init__(
            spec("sum", mode="sum", padding_idx=0, sharding="row_wise",
                 features=("sum", "one", "weighted", "weighted2", "ragged_sum")),
            spec("mean", mode="mean", padding_idx=-1, sharding="column_wise"),
            spec("type", mode="max", padding_idx=2, sharding="table_wise"),
            spec("rows.a", padding_idx=1, features=("rows", "rows1", "ragged", "flat")),
            spec("half", mode="sum", dtype=torch.float16, padding_idx=1,
                 features=("half", "half_weighted")),
            spec("brain", mode="mean", dtype=torch.bfloat16, padding_idx=0),
            spec("half max", mode="max", dtype=torch.float16, padding_idx=0),
            spec("half rows", dtype=torch.float16, sharding="row_wise"),
            spec("norm", mode="sum", max_norm=0.9, sharding="row_wise"),
            hp.RemoteEmbeddingSpec("tower", module=Tower, optimizer=torch.optim.SGD, seed=1),
        )  # fmt: skip
        torch.manual_seed(2)
        self.top = nn.Linear(DIM, 2)
        self.drop = nn.Dropout(0.5)

    def sparse_inputs(self, batch: Features) -> Features:
        return {name: value for name, value in batch.items() if name != "label"}

    def forward(self, embeddings: dict[str, Tensor], batch: Features) -> Tensor:
        total = batch["label"].new_zeros(SIZE, DIM)
        for name, values in embeddings.items():
            if values.is_nested:
                values = values.to_padded_tensor(0.0).sum(1)
            elif values.dim() == 3:
                values = values.sum(1)
            total = total + (values[:SIZE] if name == "flat" else values)
        return self.top(self.drop(total / len(embeddings)))


def make(seed: int) -> Features:
    """A batch of every feature, with empty bags and padding in it."""
    draw = torch.Generator().manual_seed(seed)

    def ids(*shape: int) -> Tensor:
        return torch.randint(ROWS, shape, generator=draw)

    def bags() -> tuple[Tensor, Tensor]:
        lengths = torch.randint(4, (SIZE,), generator=draw)
        lengths[0], lengths[1] = 0, 7
        return ids(int(lengths.sum())), lengths.cumsum(0) - lengths

    def ragged() -> Tensor:
        parts = [ids(length) for length in (2, 1, 0, 3, 9, 1)]
        return torch.nested.nested_tensor(parts, layout=torch.jagged)

    def weights(values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return *values, torch.rand(values[0].shape, generator=draw)

    return {
        "sum": bags(), "one": ids(SIZE).int(), "weighted": weights(bags()),
        "weighted2": (ids(SIZE, 3), None, torch.rand(SIZE, 3, generator=draw)),
        "ragged_sum": ragged(), "mean": ids(SIZE, 5), "type": bags(), "rows": ids(SIZE, 4),
        "rows1": ids(SIZE), "ragged": ragged(), "flat": (ids(SIZE), torch.arange(SIZE)),
        "half": ids(SIZE, 8), "half_weighted": weights(bags()), "brain": bags(),
        "half max": bags(), "half rows": ids(SIZE), "norm": bags(),
        "tower": (torch.rand(SIZE, 3, generator=draw), torch.rand(SIZE, generator=draw)),
        "label": torch.randn(SIZE, 2, generator=draw),
    }  # fmt: skip


TRACED = ("sum", "weighted", "mean", "type", "rows", "half", "brain", "half max",
          "norm", "tower", "label")  # fmt: skip


def traced(batch: Features) -> Features:
    """Without what torch.export has no form for: None and nested tensors."""
    return {name: value for name, value in batch.items() if name in TRACED}


KEPT = torch.tensor([3, 4, 5, 9, 28])


def train_every(ctx: hp.TrainerContext, consistency: str, folder: str) -> None:
    """Train, and hand the model over in every form, with what the hybrid model itself gives."""
    export._PIECE_BYTES = 10 * DIM * 4  # so that ten rows are a piece
    model = Every()
    loop = hp.TrainerLoop(
        model, ctx, loss=lambda output, batch: F.mse_loss(output, batch["label"]),
        dense_optimizer=dense_sgd, sparse_optimizer=hp.optim.Adagrad(lr=0.1),
        consistency=consistency,
    )  # fmt: skip
    loop.fit([make(10 * step + ctx.rank) for step in range(3)], epochs=2)
    if ctx.rank != 1:  # not the first, to show that any one will do
        return
    to = Path(folder)
    torch.save(model.export(), to / "whole.pt")
    torch.save(model.export(directory=to / "tables"), to / "mapped.pt")
    torch.save(model.export(tables=["sum", "rows.a"]), to / "some.pt")
    torch.save(model.export(dtype=torch.float16), to / "half.pt")
    kept = {"sum": KEPT, "half": KEPT, "rows.a": KEPT.flip(0)}
    torch.save(model.export(rows=kept), to / "kept.pt")
    torch.save(model.export(rows=kept, directory=to / "kept"), to / "kept_mapped.pt")
    torch.save({name: model.rows(name) for name in ("sum", "half", "rows.a")}, to / "rows.pt")
    model.eval()
    given = []
    with torch.no_grad():
        for seed in range(100, 103):
            batch = make(seed)
            found = model.lookup(batch)
            small = traced(batch)
            given.append((batch, found, model(found, batch), model(model.lookup(small), small)))
    torch.save(given, to / "given.pt")


def refused_exports(ctx: hp.TrainerContext) -> list[str]:
    """What each wrong call says."""
    model = Every()
    model.connect(ctx, hp.optim.SGD(lr=0.1))
    calls: list[dict[str, Any]] = [
        {"tables": ["nothing"]}, {"tables": "sum"}, {"dtype": torch.int64},
        {"rows": {"tower": KEPT}}, {"rows": {"sum": torch.tensor([ROWS])}},
        {"tables": ["mean"], "rows": {"sum": KEPT}},
    ]  # fmt: skip
    messages = [_message(lambda call=call: model.export(**call)) for call in calls]  # type: ignore[misc]
    model.held = (value for value in [1])  # type: ignore[assignment]
    return [*messages, _message(model.export)]


def _message(call: Any) -> str:
    try:
        call()
    except hp.HybridParError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Wide(hp.HybridModel[Tensor]):
    def __init__(self, rows: int) -> None:
        super().__init__(
            hp.RemoteEmbeddingSpec(
                "wide",
                num_embeddings=rows,
                embedding_dim=64,
                init=nn.init.ones_,
                sharding="row_wise",
            )
        )

    def sparse_inputs(self, batch: Tensor) -> Features:
        return {"wide": batch}

    def forward(self, embeddings: dict[str, Tensor], batch: Tensor) -> Tensor:
        return embeddings["wide"]


def memory_of_an_export(ctx: hp.TrainerContext, rows: int, folder: str) -> tuple[int, bool]:
    """By how many bytes this process grew, writing a large table into a file."""
    model = Wide(rows)
    model.connect(ctx, hp.optim.SGD(lr=0.1))
    before = _peak()
    exported = model.export(directory=folder)
    written = _peak() - before
    return written, bool((exported(torch.tensor([0, rows // 2, rows - 1])) == 1).all())


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- set_rows --------------------------------------------------------------------------------------


class Cold(hp.HybridModel[Tensor]):
    def __init__(self) -> None:
        super().__init__(
            spec("table", sharding="table_wise"),
            spec("row", sharding="row_wise"),
            spec("column", sharding="column_wise"),
            spec("half", sharding="row_wise", dtype=torch.float16),
            spec("padded", sharding="row_wise", padding_idx=5),
            spec("norm", sharding="row_wise", max_norm=1.0),
        )
        torch.manual_seed(0)
        self.top = nn.Linear(DIM, 1)

    def sparse_inputs(self, batch: Tensor) -> Features:
        return {one.name: batch for one in self.specs}

    def forward(self, embeddings: dict[str, Tensor], batch: Tensor) -> Tensor:
        return self.top(sum(embeddings.values())).squeeze(1)


class Written(NamedTuple):
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    state_before: dict[str, Tensor]
    state_after: dict[str, Tensor]
    looked_up: Tensor
    trained: dict[str, Tensor]
    messages: list[str]


def cold_loop(ctx: hp.TrainerContext, consistency: str) -> hp.TrainerLoop[Tensor]:
    return hp.TrainerLoop(
        Cold(), ctx, loss=lambda output, batch: output.square().mean(),
        dense_optimizer=dense_sgd, sparse_optimizer=hp.optim.Adagrad(lr=0.1),
        consistency=consistency,
    )  # fmt: skip


def written_ids(rank: int) -> Tensor:
    return torch.arange(rank, ROWS - 4, 2).flip(0)


def written_values(rank: int) -> Tensor:
    ids = written_ids(rank)
    return torch.stack([10.0 * ids + column for column in range(DIM)], dim=1) / 3


def write(ctx: hp.TrainerContext, consistency: str) -> Written:
    """Train; both trainers write their rows, the second without a new state; train on."""
    row_writes._WRITE_BYTES = 3 * DIM * 4  # so that three rows are a piece
    loop = cold_loop(ctx, consistency)
    model, names = loop.model, [one.name for one in loop.model.specs]
    batch = torch.arange(ROWS)
    loop.fit([batch, batch])

    def rows() -> dict[str, Tensor]:
        return {name: model.rows(name) for name in names}

    def state() -> dict[str, Tensor]:
        return {name: loop.sparse_optimizer.state_of(name, "sum") for name in names}

    def meet() -> None:
        torch.distributed.barrier()

    before, state_before = rows(), state()
    meet()
    for name in names:
        values = written_values(ctx.rank)
        model.set_rows(name, written_ids(ctx.rank), values, reset_state=ctx.rank == 0)
    meet()
    after, state_after = rows(), state()
    meet()
    with torch.no_grad():
        looked_up = model.lookup(batch)["norm"]
    messages = refused_writes(model)
    loop.fit([batch] if ctx.rank == 0 else [])
    return Written(before, after, state_before, state_after, looked_up, rows(), messages)


def refused_writes(model: Cold) -> list[str]:
    two, ids = torch.ones(2, DIM), torch.tensor([1, 2])
    calls: list[tuple[str, Any, Any]] = [
        ("nothing", ids, two), ("row", torch.tensor([1, 1]), two),
        ("row", torch.tensor([1, ROWS]), two), ("row", torch.tensor([-1, 2]), two),
        ("row", ids, torch.ones(2, DIM + 1)), ("row", ids, torch.ones(3, DIM)),
        ("row", ids, two.long()), ("row", ids.float(), two), ("row", ids.view(1, 2), two),
        ("row", ids, [1.0]),
    ]  # fmt: skip
    return [_message(lambda call=call: model.set_rows(*call)) for call in calls]  # type: ignore[misc]


# -- load_plain ------------------------------------------------------------------------------------

KEYS = {name: f"tables.{name}.weight" for name in ("item", "user", "word")}


def fill_and_train(
    ctx: hp.TrainerContext, state: dict[str, Tensor], sharding: str, steps: int
) -> tuple[dict[str, Tensor], list[str]]:
    """Fill the model from a plain one's state, train, and give the state back; and refusals."""
    model = Model("sum", sharding)
    loop = hp.TrainerLoop(
        model, ctx, loss=lambda output, batch: F.cross_entropy(output, batch.label),
        dense_optimizer=dense_sgd, sparse_optimizer=hp.optim.SGD(lr=0.1),
    )  # fmt: skip
    messages = [
        _message(lambda: model.load_plain({**state, "more": torch.ones(1)}, tables=KEYS)),
        _message(
            lambda: model.load_plain(
                {"top.bias": torch.ones(1), "x.weight": torch.ones(2, 3)},
                tables={"item": "x.weight", "user": "u", "nothing": "n"},
            )
        ),
    ]
    model.load_plain(state, tables=KEYS)
    loop.fit(batches_of(ctx.rank, steps, bags=True))
    return model.export().plain_state_dict(KEYS), messages


class Towers(hp.HybridModel[Features]):
    def __init__(self) -> None:
        super().__init__(
            hp.RemoteEmbeddingSpec("tower", module=Tower, optimizer=torch.optim.Adagrad, seed=1)
        )
        self.top = nn.Linear(DIM, 2)

    def sparse_inputs(self, batch: Features) -> Features:
        return {"tower": batch["tower"]}

    def forward(self, embeddings: dict[str, Tensor], batch: Features) -> Tensor:
        return self.top(embeddings["tower"])


def fill_module(
    ctx: hp.TrainerContext, state: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    model = Towers()
    loop = hp.TrainerLoop(
        model, ctx, loss=lambda output, batch: F.mse_loss(output, batch["label"]),
        dense_optimizer=dense_sgd,
    )  # fmt: skip
    loop.fit([make(1)])
    short = {key: value for key, value in state.items() if key != "side.linear.bias"}
    messages = [_message(lambda: model.load_plain(short, tables={"tower": "side"}))]
    model.load_plain(state, tables={"tower": "side"})
    filled = model.export().plain_state_dict({"tower": "side"})
    loop.fit([make(2)])
    return filled, model.export().plain_state_dict({"tower": "side"}), messages
