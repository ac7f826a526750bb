"""What a trainer refuses, tried one after another in one world. Imports no test tool."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hybridpar as hp

ITEMS, USERS, DIM = 10, 6, 4


class Model(hp.HybridModel[dict[str, Any]]):
    """Tables "item" (sum) and "user" (a row an id); a batch says what goes to them."""

    def __init__(self, *specs: hp.RemoteEmbeddingSpec) -> None:
        usual = table("item", mode="sum"), table("user", num_embeddings=USERS)
        super().__init__(*specs or usual)
        self.top = nn.Linear(DIM, 1)

    def sparse_inputs(self, batch: dict[str, Any]) -> Any:
        return batch["ids"]

    def forward(self, embeddings: dict[str, Tensor], batch: dict[str, Any]) -> Tensor:
        return self.top(sum(value.sum(0) for value in embeddings.values()))


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def total(output: Tensor, batch: Any) -> Tensor:
    return output.sum()


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def make_loop(ctx: hp.TrainerContext, *specs: hp.RemoteEmbeddingSpec, **options: Any) -> Any:
    given = {"loss": total, "dense_optimizer": adam, "sparse_optimizer": hp.optim.SGD(lr=0.1)}
    return hp.TrainerLoop(Model(*specs), ctx, **given | options)


# -- batches, each refused when it is looked at ----------------------------------------------------

BATCHES: dict[str, Any] = {
    "id too large": {"item": ids(3, 10)},
    "negative id": {"user": ids(3, -2)},
    "float ids": {"user": torch.tensor([1.0])},
    "bool ids": {"user": torch.tensor([True, False])},
    "uint8 ids": {"user": torch.tensor([1], dtype=torch.uint8)},
    "scalar ids": {"item": torch.tensor(1)},
    "meta ids": {"item": torch.empty(3, dtype=torch.int64, device="meta")},
    "sparse ids": {"item": torch.tensor([0, 1]).to_sparse()},
    "offsets decrease": {"item": (ids(1, 2, 3), ids(0, 2, 1))},
    "offsets from 1": {"item": (ids(1, 2, 3), ids(1, 2))},
    "offsets past the end": {"item": (ids(1, 2), ids(0, 3))},
    "float offsets": {"item": (ids(1, 2), torch.tensor([0.0]))},
    "meta offsets": {"item": (ids(1, 2), torch.zeros(1, dtype=torch.int64, device="meta"))},
    "2-D offsets": {"item": (ids(1, 2), ids(0, 1).reshape(1, 2))},
    "2-D ids with offsets": {"item": (ids(1, 2).reshape(1, 2), ids(0))},
    "no offset": {"item": (ids(1, 2), ids())},
    "weights too short": {"item": (ids(1, 2), ids(0), torch.ones(1))},
    "weights of whole numbers": {"item": (ids(1, 2), ids(0), ids(1, 1))},
    "meta weights": {"item": (ids(1, 2), ids(0), torch.ones(2, device="meta"))},
    "weights without a sum": {"user": (ids(1, 2), None, torch.ones(2))},
    "a list": {"item": [1, 2]},
    "None": {"item": None},
    "unknown feature": {"itme": ids(1)},
    "a number as a feature": {3: ids(1)},
    "no mapping": [ids(1)],
}


def refused_batches(ctx: hp.TrainerContext) -> dict[str, str]:
    """What is said to each of the bad batches, one loop and its tables for all."""
    loop = make_loop(ctx)
    good = {"ids": {"item": ids(1, 2), "user": ids(3)}}
    loop.fit([good, good])
    before = loop.model.rows("item"), loop.model.rows("user")
    said = {name: _said(lambda bad=bad: loop.fit([{"ids": bad}])) for name, bad in BATCHES.items()}
    same = all(map(torch.equal, before, (loop.model.rows("item"), loop.model.rows("user"))))
    loop.fit([good])  # still works
    return said | {"same": str(same)}


def _said(action: Callable[[], object]) -> str:
    """The type and message of what an action raises."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# -- losses, and what fit is given -----------------------------------------------------------------


def vector(output: Tensor, batch: Any) -> Tensor:
    return output.expand(3)


def number(output: Tensor, batch: Any) -> float:
    return output.item()


def nothing(output: Tensor, batch: Any) -> None:
    return None


def empty(output: Tensor, batch: Any) -> dict[str, Tensor]:
    return {}


def one_of_two(output: Tensor, batch: Any) -> dict[str, Tensor]:
    return {"click": output.sum(), "price": output.expand(2)}


def detached(output: Tensor, batch: Any) -> Tensor:
    return output.sum().detach()


def of_the_batch(output: Tensor, batch: Any) -> Tensor:
    return batch["ids"]["item"].float().mean()


def a_number(epoch: int) -> int:
    return epoch


LOSSES = [vector, number, nothing, empty, one_of_two, detached, of_the_batch]
BATCH_SOURCES: dict[str, Any] = {
    "None": None, "a number": 3, "text": "batches.pt", "function": a_number,
}  # fmt: skip
EPOCHS: dict[str, Any] = {"-1": -1, "half": 0.5, "None": None}


def refused_losses(ctx: hp.TrainerContext) -> dict[str, str]:
    said = {}
    batch = {"ids": {"item": ids(1, 2)}}
    for loss in LOSSES:
        loop = make_loop(ctx, loss=loss)
        said[loss.__name__] = _said(lambda loop=loop: loop.fit([batch]))
    loop = make_loop(ctx)
    for name, source in BATCH_SOURCES.items():
        said[name] = _said(lambda source=source: loop.fit(source))
    for name, epochs in EPOCHS.items():
        said[f"epochs {name}"] = _said(lambda epochs=epochs: loop.fit([batch], epochs=epochs))
    return said


# -- what cannot be placed -------------------------------------------------------------------------


def table(name: str = "item", **more: Any) -> hp.RemoteEmbeddingSpec:
    sizes: dict[str, Any] = {"num_embeddings": ITEMS, "embedding_dim": DIM}
    return hp.RemoteEmbeddingSpec(name, **sizes | more)


def no_module() -> str:
    return "not a module"


PLACES: dict[str, dict[str, Any]] = {
    "too large": {"specs": [table(num_embeddings=1 << 40)]},
    "too large together": {
        "specs": [table(f"t{n}", num_embeddings=1 << 30, embedding_dim=64) for n in range(5)],
        "sparse_optimizer": hp.optim.Adam(),
    },
    "max_norm by columns": {"specs": [table(max_norm=1.0, sharding="column_wise")]},
    "no such file": {"specs": [table(init="/nowhere/values.pt")]},
    "init that cannot be sent": {"specs": [table(init=lambda rows: rows.zero_())]},
    "no optimizer": {"specs": [table()], "sparse_optimizer": None},
    "optimizer's class": {"specs": [table()], "sparse_optimizer": hp.optim.Adagrad},
    "optimizer of torch": {"specs": [table()], "sparse_optimizer": torch.optim.SparseAdam},
    "optimizer of no table": {"specs": [table()], "sparse_optimizer": {
        "item": hp.optim.SGD(), "itme": hp.optim.SGD()}},
    "no module": {"specs": [hp.RemoteEmbeddingSpec(
        "tower", module=no_module, optimizer=functools.partial(torch.optim.SGD, lr=0.1))]},
    "schedulers of nothing": {"specs": [table()], "schedulers": lambda dense, sparse: [0.5]},
    "no schedulers": {"specs": [table()], "schedulers": lambda dense, sparse: None},
    "no dense optimizer": {"specs": [table()], "dense_optimizer": lambda params: None},
}  # fmt: skip


def refused_places(ctx: hp.TrainerContext) -> dict[str, str]:
    said = {}
    for name, given in PLACES.items():
        options = {key: value for key, value in given.items() if key != "specs"}
        said[name] = _said(lambda o=options, g=given: make_loop(ctx, *g["specs"], **o))
    loop = make_loop(ctx)  # and the job goes on
    return said | {"after": str(loop.fit([{"ids": {"item": ids(1)}}]).steps)}


def too_large(ctx: hp.TrainerContext) -> None:
    make_loop(ctx, table("huge", num_embeddings=1 << 40))


# -- what is allowed -------------------------------------------------------------------------------


def allowed(ctx: hp.TrainerContext) -> dict[str, Any]:
    """What might look wrong, and is not."""
    loop = make_loop(ctx, table("item", mode="mean", seed=1), table("user", seed=2))
    model = loop.model
    weight = model.rows("item")
    bags = ids(1, 2, 2), ids(0, 0, 2)
    ours = model.lookup({"ids": {"item": bags}})["item"].detach()
    plain = F.embedding_bag(bags[0], weight, bags[1], mode="mean")
    agreed = model.lookup({"ids": {"item": ids(1, 2), "user": ids(1, 2, 3)}})
    return {
        "mean of an empty bag": bool((ours[0] == 0).all()) and torch.allclose(ours, plain),
        "a missing feature": loop.fit([{"ids": {"item": ids(1)}}, {"ids": {"user": ids(1)}}]).steps,
        "numbers of bags that differ": {name: len(rows) for name, rows in agreed.items()},
        "no batch": loop.fit([]).steps,
        "no epoch": loop.fit([], epochs=0).steps,
    }


def few_rows(ctx: hp.TrainerContext) -> list[bool]:
    """Tables of fewer rows or columns than there are servers, against plain torch."""
    right = []
    for sharding in ("table_wise", "row_wise", "column_wise"):
        loop = make_loop(
            ctx,
            table("one", num_embeddings=1, embedding_dim=1, sharding=sharding, mode="sum", seed=4),
            table("two", num_embeddings=2, embedding_dim=2, sharding=sharding, mode="sum", seed=5),
        )
        model = loop.model
        before = {name: model.rows(name) for name in ("one", "two")}
        model.forward = lambda embeddings, batch: sum(e.sum() for e in embeddings.values())
        loop.fit([{"ids": {"one": ids(0), "two": ids(1)}}] * 2)
        changes = torch.cat([(before[name] - model.rows(name)).flatten() for name in before])
        right.append(torch.allclose(changes, torch.tensor([0.2, 0.0, 0.0, 0.2, 0.2])))
    return right
