"""Models whose plan is compared with what real jobs hold and send. Imports no test tool."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hybridpar as hp

STEPS = 6
ROWS, DIM = 300, 12
TRAINERS = 2


class Batch(NamedTuple):
    """20 samples of four bags each, by feature, and their labels."""

    inputs: dict[str, Any]
    label: Tensor


ADAGRAD = hp.optim.Adagrad(lr=0.1)


@dataclass(frozen=True)
class Case:
    """A model to plan and to run."""

    sharding: str | None = None
    kind: str = "sum"
    optimizer: Any = ADAGRAD
    settings: tuple[tuple[str, Any], ...] = ()
    extra: str = ""

    def __str__(self) -> str:
        name = f"{self.sharding} {self.kind} {self.extra}"
        return name + "".join(f" {key}={value}" for key, value in self.settings)


KINDS = ("sum", "one id", "weighted")
CASES = [
    Case(sharding, kind)
    for sharding in ("table_wise", "row_wise", "column_wise")
    for kind in KINDS
] + [
    Case(kind="sum", settings=(("consistency", "async"),)),
    Case("row_wise", settings=(("consistency", "bounded"), ("staleness", 0))),
    Case("row_wise", settings=(("wire_dtype", torch.bfloat16),)),
    Case("row_wise", optimizer=hp.optim.RowWiseAdagrad(lr=0.1, clip_norm=1.0)),
    Case("column_wise", optimizer=hp.optim.Adam(lr=0.1), extra="half"),
    Case(extra="module"),
    Case(extra="frozen"),
    Case(extra="ignored"),
]  # fmt: skip


class Model(hp.HybridModel[Batch]):
    def __init__(self, case: Case) -> None:
        first = hp.RemoteEmbeddingSpec(
            "first",
            num_embeddings=ROWS,
            embedding_dim=DIM,
            mode=None if case.kind == "one id" else "sum",
            sharding=case.sharding,  # type: ignore[arg-type]
            dtype=torch.float16 if case.extra == "half" else torch.float32,
        )
        second = replace(
            first, name="second", features=("a", "b"), num_embeddings=ROWS + 1,
            trainable=case.extra != "frozen",
        )  # fmt: skip
        module = hp.RemoteEmbeddingSpec(
            "tower", module=nn.Linear, args=(DIM, DIM), optimizer=torch.optim.Adam
        )
        super().__init__(first, second, *([module] if case.extra == "module" else []))
        self.case = case
        self.top = nn.Linear(DIM, 3)

    def sparse_inputs(self, batch: Batch) -> dict[str, Any]:
        return batch.inputs

    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor:
        if self.case.extra == "ignored":
            embeddings = {name: rows for name, rows in embeddings.items() if name != "b"}
        return self.top(sum(embeddings.values()))


def batches_of(case: Case, rank: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(rank)
    return [Batch(_inputs(case, draw), torch.zeros(20, dtype=torch.int64)) for _ in range(STEPS)]


def _inputs(case: Case, draw: torch.Generator) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    for feature in ("first", "a", "b"):
        if case.kind == "one id":
            inputs[feature] = torch.randint(ROWS, (20,), generator=draw)
            continue
        lengths = torch.randint(6, (20,), generator=draw)
        ids = torch.randint(ROWS, (int(lengths.sum()),), generator=draw)
        inputs[feature] = ids, lengths.cumsum(0) - lengths
        if case.kind == "weighted":
            inputs[feature] += (torch.rand(len(ids), generator=draw),)
    if case.extra == "module":
        inputs["tower"] = torch.rand(20, DIM, generator=draw)
    return inputs


class Measured(NamedTuple):
    """What one trainer saw: bytes that servers hold, and that went to and came from each."""

    held: dict[int, int]
    sent: list[int]
    received: list[int]


def run(ctx: hp.TrainerContext, case: Case) -> Measured:
    loop = hp.TrainerLoop(
        Model(case),
        ctx,
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch.label),
        dense_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        sparse_optimizer=case.optimizer,
        **dict(case.settings),
    )
    before = [_crossed(peer._socket) for peer in ctx._servers]
    loop.fit(batches_of(case, ctx.rank))
    after = [_crossed(peer._socket) for peer in ctx._servers]
    held = loop.model._connected.server_bytes()
    loop.model.disconnect()
    return Measured(
        held,
        [new[0] - old[0] for new, old in zip(after, before, strict=True)],
        [new[1] - old[1] for new, old in zip(after, before, strict=True)],
    )


def run_all(ctx: hp.TrainerContext) -> list[Measured]:
    """Every case one after another, in one world."""
    return [run(ctx, case) for case in CASES]


def _crossed(connection: socket.socket) -> tuple[int, int]:
    """Bytes that the kernel has sent, and seen acknowledged, and received on a connection."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    acked, received = struct.unpack_from("QQ", info, 120)  # tcpi_bytes_acked and _received
    return acked, received


def many_ids(rank: int) -> list[Batch]:
    """Two steps of 800 bags a feature, so that frames are a small part."""
    draw = torch.Generator().manual_seed(rank)
    offsets = torch.arange(0, 4000, 5)
    return [
        Batch(
            {name: (torch.randint(ROWS, (4000,), generator=draw), offsets)
             for name in ("first", "a", "b")},
            torch.zeros(800, dtype=torch.int64),
        )
        for _ in range(2)
    ]  # fmt: skip


class _Ends(hp.callbacks.Callback):
    def on_end(self, end: hp.callbacks.End) -> None:
        self.servers = end.servers


def beside(
    ctx: hp.TrainerContext, page: str, plan: dict[str, Any]
) -> dict[str, tuple[float, float]]:
    """Write a page with a plan; the rows and bytes of a step, by server."""
    ends, batches = _Ends(), many_ids(ctx.rank)
    hp.TrainerLoop(
        Model(Case("row_wise")), ctx,
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch.label),
        dense_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        sparse_optimizer=ADAGRAD,
        callbacks=[ends, hp.callbacks.Report(page, plan=plan)],
    ).fit(batches)  # fmt: skip
    return {
        each.server: (
            each.rows / len(batches),
            (each.id_bytes + each.row_bytes + each.gradient_bytes) / len(batches),
        )
        for each in ends.servers
    }
