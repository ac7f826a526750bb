"""Tables of every kind, each beside the plain torch module that it must equal.

A scenario's ``value`` goes to ``sparse_inputs`` as it is, and to the plain module. Imports no test
tool.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hybridpar as hp

ROWS, DIM, STEPS, LR = 29, 8, 6, 0.2
SEED = 17

Make = Callable[[torch.Generator], Any]


class Scenario(NamedTuple):
    """One table, what a batch asks of it, and plain torch's counterpart."""

    name: str
    spec: dict[str, Any]
    value: Make
    plain: Callable[[], nn.Module]


def ids(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(ROWS, shape, generator=generator)


def bags(generator: torch.Generator, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Seven bags of 0 to 3 ids, some of them empty."""
    lengths = torch.randint(4, (7,), generator=generator)
    indices = ids(generator, int(lengths.sum()))
    return indices.to(dtype), (lengths.cumsum(0) - lengths).to(dtype)


def weighted(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    indices, offsets = bags(generator)
    return indices, offsets, torch.rand(indices.shape, generator=generator)


def jagged(generator: torch.Generator) -> Tensor:
    return torch.nested.nested_tensor(
        [ids(generator, length) for length in (2, 1, 3)], layout=torch.jagged
    )


def sometimes_empty(generator: torch.Generator) -> Tensor:
    """No sample at all on every other trainer and step."""
    return ids(generator, 0 if generator.initial_seed() % 2 else 5)


def weight_of_file() -> Tensor:
    return torch.arange(ROWS * DIM).reshape(ROWS, DIM).float().sin()


FILE = Path(tempfile.gettempdir()) / "hybridpar_test_initial_values.pt"
uniform = functools.partial(nn.init.uniform_, a=-1.0, b=1.0)


def embedding_bag(**more: Any) -> Callable[[], nn.Module]:
    return functools.partial(nn.EmbeddingBag, ROWS, DIM, **more)


def embedding(**more: Any) -> Callable[[], nn.Module]:
    return functools.partial(nn.Embedding, ROWS, DIM, **more)


def with_values(values: Callable[[], Tensor]) -> nn.Module:
    return nn.EmbeddingBag.from_pretrained(values(), freeze=False, mode="sum")


def uniform_values() -> Tensor:
    torch.manual_seed(SEED)
    return uniform(torch.empty(ROWS, DIM))


def half_values(dtype: torch.dtype) -> Tensor:
    torch.manual_seed(SEED)
    return nn.init.normal_(torch.empty(ROWS, DIM)).to(dtype).float()


SCENARIOS = [
    Scenario("sum", {"mode": "sum"}, bags, embedding_bag(mode="sum")),
    Scenario("mean", {"mode": "mean"}, bags, embedding_bag(mode="mean")),
    Scenario("max", {"mode": "max"}, bags, embedding_bag(mode="max")),
    Scenario("max_fixed", {"mode": "max"}, lambda g: ids(g, 5, 3), embedding_bag(mode="max")),
    Scenario("sum_fixed", {"mode": "sum"}, lambda g: ids(g, 5, 3), embedding_bag(mode="sum")),
    Scenario(
        "int32",
        {"mode": "sum"},
        functools.partial(bags, dtype=torch.int32),
        embedding_bag(mode="sum"),
    ),
    Scenario("one_id", {}, lambda g: ids(g, 6), embedding()),
    Scenario("sequences", {}, lambda g: ids(g, 5, 3), embedding()),
    Scenario("sequences_3d", {}, lambda g: ids(g, 2, 3, 2), embedding()),
    Scenario("rows_of_bags", {}, bags, embedding()),
    Scenario("jagged_rows", {}, jagged, embedding()),
    Scenario("jagged_sum", {"mode": "sum"}, jagged, embedding_bag(mode="sum")),
    Scenario("jagged_max", {"mode": "max"}, jagged, embedding_bag(mode="max")),
    Scenario("weighted", {"mode": "sum"}, weighted, embedding_bag(mode="sum")),
    Scenario(
        "weighted_fixed",
        {"mode": "sum"},
        lambda g: (ids(g, 4, 3), None, torch.rand(4, 3, generator=g)),
        embedding_bag(mode="sum"),
    ),
    Scenario("empty", {}, sometimes_empty, embedding()),
    *(
        Scenario(
            f"padding_{mode}",
            {"mode": mode, "padding_idx": 3},
            lambda g: (torch.randint(6, (12,), generator=g), torch.tensor([0, 1, 1, 5, 9])),
            embedding_bag(mode=mode, padding_idx=3),
        )
        for mode in ("sum", "mean", "max")
    ),
    Scenario(
        "padding_weighted",
        {"mode": "sum", "padding_idx": 3},
        lambda g: (
            torch.randint(6, (9,), generator=g),
            torch.tensor([0, 2, 7]),
            torch.rand(9, generator=g),
        ),
        embedding_bag(mode="sum", padding_idx=3),
    ),
    Scenario(
        "padding_rows",
        {"padding_idx": -1},
        lambda g: torch.randint(ROWS - 4, ROWS, (5, 3), generator=g),
        embedding(padding_idx=-1),
    ),
    Scenario(
        "max_norm",
        {"mode": "sum", "max_norm": 1.5},
        bags,
        embedding_bag(max_norm=1.5, mode="sum"),
    ),
    Scenario(
        "max_norm_l1",
        {"max_norm": 2.0, "norm_type": 1.0},
        lambda g: ids(g, 6),
        embedding(max_norm=2.0, norm_type=1.0),
    ),
    Scenario(
        "init",
        {"mode": "sum", "init": uniform},
        bags,
        functools.partial(with_values, uniform_values),
    ),
    Scenario(
        "init_tensor",
        {"mode": "sum", "init": weight_of_file()},
        bags,
        functools.partial(with_values, weight_of_file),
    ),
    Scenario(
        "init_file",
        {"mode": "sum", "init": FILE},
        bags,
        functools.partial(with_values, weight_of_file),
    ),
    *(
        Scenario(
            str(dtype).removeprefix("torch."),
            {"mode": "sum", "dtype": dtype},
            bags,
            functools.partial(with_values, functools.partial(half_values, dtype)),
        )
        for dtype in (torch.float16, torch.bfloat16)
    ),
]


def values_of(scenario: Scenario, rank: int) -> list[Any]:
    """What a trainer asks for in each step."""
    return [
        scenario.value(torch.Generator().manual_seed(10 * step + rank)) for step in range(STEPS)
    ]


def head() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(DIM, 3)


def loss_of(top: nn.Linear, embedding: Tensor) -> Tensor:
    flat = embedding.values() if embedding.is_nested else embedding
    return top(flat).tanh().square().sum() / 10


class OneTable(hp.HybridModel[Any]):
    def __init__(self, **spec: Any) -> None:
        given = {"num_embeddings": ROWS, "embedding_dim": DIM, "seed": SEED} | spec
        super().__init__(hp.RemoteEmbeddingSpec("t", **given))
        self.top = head()

    def sparse_inputs(self, batch: Any) -> dict[str, Any]:
        return {"t": batch}

    def forward(self, embeddings: dict[str, Tensor], batch: Any) -> Tensor:
        return loss_of(self.top, embeddings["t"])


class Outcome(NamedTuple):
    losses: list[float]
    rows: Tensor
    top: Tensor


def dense_sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR)


def train_table(
    ctx: hp.TrainerContext, scenario: Scenario, sharding: str | None,
    settings: hp.optim.SparseOptimizerSettings,
) -> Outcome:  # fmt: skip
    model = OneTable(**scenario.spec, sharding=sharding)
    losses: list[float] = []

    def loss(output: Tensor, batch: Any) -> Tensor:
        losses.append(output.item())
        return output

    loop = hp.TrainerLoop(
        model, ctx, loss=loss, dense_optimizer=dense_sgd, sparse_optimizer=settings
    )
    loop.fit(values_of(scenario, ctx.rank))
    return Outcome(losses, model.rows("t"), model.top.weight.detach().clone())


def train_all(ctx: hp.TrainerContext) -> dict[tuple[str, str], Outcome]:
    """Every scenario, cut in every way that it may be."""
    settings = hp.optim.SGD(lr=LR)
    outcomes = {}
    for scenario in SCENARIOS:
        for sharding in ("table_wise", "row_wise", "column_wise"):
            if sharding != "column_wise" or "max_norm" not in scenario.spec:
                outcomes[scenario.name, sharding] = train_table(ctx, scenario, sharding, settings)
    return outcomes


def call_plain(module: nn.Module, value: Any) -> Tensor:
    """The plain module on a scenario's value."""
    if isinstance(module, nn.Embedding):
        if isinstance(value, tuple):
            return module(value[0])
        return module(value.values()) if value.is_nested else module(value)
    if isinstance(value, tuple):
        weights = value[2] if len(value) == 3 else None
        return module(value[0], value[1], per_sample_weights=weights)
    if value.is_nested:
        return module(value.values(), value.offsets()[:-1])
    return module(value)


def train_plain(scenario: Scenario, trainers: int) -> tuple[list[list[float]], Tensor, Tensor]:
    """Each trainer's losses, the table and the top, had one process done it all."""
    torch.manual_seed(SEED)
    table = scenario.plain()
    top = head()
    optimizer = torch.optim.SGD([*table.parameters(), *top.parameters()], lr=LR)
    values = [values_of(scenario, rank) for rank in range(trainers)]
    losses: list[list[float]] = [[] for _ in range(trainers)]
    dtype = scenario.spec.get("dtype", torch.float32)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [loss_of(top, call_plain(table, values[rank][step])) for rank in range(trainers)]
        for own, part in zip(losses, parts, strict=True):
            own.append(part.item())
        (sum(parts) / trainers).backward()
        optimizer.step()
        with torch.no_grad():
            table.weight.copy_(table.weight.to(dtype))
    return losses, table.weight.detach(), top.weight.detach()
