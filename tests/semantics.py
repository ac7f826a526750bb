"""Train functions for the tests of training semantics, each beside its plain twin.

Imports no test tool.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hybridpar as hp
from scenarios import DIM, LR, ROWS, SEED, STEPS, bags, dense_sgd, head, ids, loss_of


class Batch(NamedTuple):
    """Ids for tables "a" and "b"; a step number."""

    a: tuple[Tensor, Tensor]
    b: Tensor
    step: int


def batches(rank: int, count: int = STEPS) -> list[Batch]:
    made = []
    for step in range(count):
        generator = torch.Generator().manual_seed(100 * step + rank)
        made.append(Batch(bags(generator), ids(generator, 7), step))
    return made


def spec(name: str, **more: Any) -> hp.RemoteEmbeddingSpec:
    given: dict[str, Any] = {"num_embeddings": ROWS, "embedding_dim": DIM, "seed": SEED}
    return hp.RemoteEmbeddingSpec(name, **given | more)


class Two(hp.HybridModel[Batch]):
    """Two tables that lie in one slab; in odd steps the loss ignores table "b"."""

    def __init__(self, **more: Any) -> None:
        super().__init__(spec("a", mode="sum", **more), spec("b", **more))
        self.top = head()
        self.dtype: torch.dtype | None = None

    def sparse_inputs(self, batch: Batch) -> dict[str, Any]:
        return {"a": batch.a, "b": batch.b}

    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Any:
        return two_losses(self, embeddings["a"], embeddings["b"], batch)


class PlainTwo(nn.Module):
    """The plain twin of `Two`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.a = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        torch.manual_seed(SEED)
        self.b = nn.Embedding(ROWS, DIM)
        self.top = head()
        self.dtype: torch.dtype | None = None

    def forward(self, batch: Batch) -> Any:
        return two_losses(self, self.a(*batch.a), self.b(batch.b), batch)


def two_losses(model: Any, a: Tensor, b: Tensor, batch: Batch) -> dict[str, Tensor]:
    model.dtype = model.top(a).dtype
    losses = {"a": loss_of(model.top, a)}
    if batch.step % 2 == 0:
        losses["b"] = 2 * loss_of(model.top, b)
    return losses


def as_it_is(output: Any, batch: Any) -> Any:
    return output


class Outcome(NamedTuple):
    rows: dict[str, Tensor]
    top: Tensor
    result: hp.FitResult
    notes: Any = None


def fit_two(
    ctx: hp.TrainerContext,
    loop_options: dict[str, Any],
    counts: list[int] | None = None,
    spec_options: dict[str, Any] | None = None,
) -> Outcome:
    """Train `Two` with given options of the loop, as many batches as said for this rank."""
    model = Two(**spec_options or {})
    options: dict[str, Any] = {
        "loss": as_it_is,
        "dense_optimizer": dense_sgd,
        "sparse_optimizer": hp.optim.SGD(lr=LR),
    }
    loop = hp.TrainerLoop(model, ctx, **options | loop_options)
    result = loop.fit(batches(ctx.rank, (counts or [STEPS] * ctx.num_trainers)[ctx.rank]))
    rows = {name: model.rows(name) for name in ("a", "b")}
    return Outcome(rows, model.top.weight.detach().clone(), result, str(model.dtype))


Step = Callable[[nn.Module, list[Batch]], None]


def plain_two(
    trainers: int,
    *,
    sparse: Callable[[list[Tensor]], torch.optim.Optimizer],
    before_step: Callable[[PlainTwo], None] | None = None,
    accumulate: int = 1,
    counts: list[int] | None = None,
) -> PlainTwo:
    """One process on all trainers' batches; tables that got no gradient are not stepped."""
    model = PlainTwo()
    tables = [sparse([table.weight]) for table in (model.a, model.b)]
    dense = dense_sgd(list(model.top.parameters()))
    counts = counts or [STEPS] * trainers
    data = [batches(rank, count) for rank, count in enumerate(counts)]
    for start in range(0, max(counts), accumulate):
        groups = [own[start : start + accumulate] for own in data if start < len(own)]
        for optimizer in (*tables, dense):
            optimizer.zero_grad()
        for group in groups:
            for batch in group:
                (sum(model(batch).values()) / len(group) / len(groups)).backward()
        if before_step is not None:
            before_step(model)
        for optimizer in (*tables, dense):
            optimizer.step()
    return model


# -- one table, integer gradients ------------------------------------------------------------------


class Counting(hp.HybridModel[Tensor]):
    """Every looked-up row gets a gradient of ones, so that a row counts its pushes."""

    def __init__(self) -> None:
        super().__init__(
            hp.RemoteEmbeddingSpec(
                "t", num_embeddings=ROWS, embedding_dim=2, init=nn.init.zeros_, sharding="row_wise"
            )
        )

    def sparse_inputs(self, batch: Tensor) -> dict[str, Any]:
        return {"t": batch}

    def forward(self, embeddings: dict[str, Tensor], batch: Tensor) -> Tensor:
        return embeddings["t"].sum()


def count_ids(rank: int, count: int) -> list[Tensor]:
    return [ids(torch.Generator().manual_seed(1000 * rank + step), 9) for step in range(count)]


def count_updates(
    ctx: hp.TrainerContext, consistency: str, staleness: int | None, counts: list[int], scale: bool
) -> tuple[Tensor, dict[int, int]]:
    """The table after everyone's pushes at lr 1, and the staleness that was met."""
    model = Counting()
    loop = hp.TrainerLoop(
        model, ctx, loss=as_it_is, dense_optimizer=dense_sgd,
        sparse_optimizer=hp.optim.SGD(lr=1.0), consistency=consistency, staleness=staleness,
        scale_gradients=scale,
    )  # fmt: skip
    own = counts[ctx.rank]

    def slowly(epoch: int):
        for step, batch in enumerate(count_ids(ctx.rank, own * 2)[own * epoch : own * (epoch + 1)]):
            if (step + ctx.rank) % 3 == 0:
                time.sleep(0.003)
            yield batch

    result = loop.fit(slowly, epochs=2)
    torch.distributed.barrier()
    return model.rows("t")[:, 0], dict(result.staleness.get("t", {}))


def run_ahead(
    ctx: hp.TrainerContext, consistency: str, staleness: int | None
) -> tuple[Tensor, dict[int, int]]:
    """A loop by hand without a dense half: nothing but the bound holds a trainer back."""
    model = Counting()
    optimizer = model.connect(
        ctx, hp.optim.SGD(lr=1.0), consistency=consistency, staleness=staleness,
        scale_gradients=False,
    )  # fmt: skip
    for batch in count_ids(ctx.rank, 30):
        model(model.lookup(batch), batch).backward()
        optimizer.step()
        time.sleep(0.004 * ctx.rank)
    model.rows("t")
    torch.distributed.barrier()
    return model.rows("t")[:, 0], dict(model._exchange.staleness["t"])


# -- dense half ------------------------------------------------------------------------------------


class Branches(hp.HybridModel[Batch]):
    """In odd steps a dense parameter is not used."""

    def __init__(self) -> None:
        super().__init__(spec("a", mode="sum"))
        self.top = head()
        self.extra = nn.Parameter(torch.ones(DIM))

    def sparse_inputs(self, batch: Batch) -> dict[str, Any]:
        return {"a": batch.a}

    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor:
        a = embeddings["a"]
        return loss_of(self.top, a * self.extra if batch.step % 2 == 0 else a)


def fit_branches(ctx: hp.TrainerContext, ddp: dict[str, Any]) -> Tensor:
    model = Branches()
    loop = hp.TrainerLoop(
        model, ctx, loss=as_it_is, dense_optimizer=dense_sgd,
        sparse_optimizer=hp.optim.SGD(lr=LR), ddp=ddp,
    )  # fmt: skip
    loop.fit(batches(ctx.rank))
    return model.extra.detach().clone()


class AllDense(hp.HybridModel[Batch]):
    def __init__(self) -> None:
        super().__init__()
        self.a = PlainTwo().a
        self.top = head()

    def sparse_inputs(self, batch: Batch) -> dict[str, Any]:
        return {}

    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor:
        assert embeddings == {}
        return loss_of(self.top, self.a(*batch.a))


def fit_all_dense(ctx: hp.TrainerContext, counts: list[int]) -> Tensor:
    model = AllDense()
    loop = hp.TrainerLoop(model, ctx, loss=as_it_is, dense_optimizer=dense_sgd)
    loop.fit(batches(ctx.rank, counts[ctx.rank]), epochs=2)
    return model.a.weight.detach().clone()


class Learned(hp.HybridModel[Batch]):
    """Per-sample weights that a dense parameter makes."""

    def __init__(self) -> None:
        super().__init__(spec("a", mode="sum"))
        self.top = head()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, ROWS))

    def sparse_inputs(self, batch: Batch) -> dict[str, Any]:
        return {"a": (*batch.a, self.scale[batch.a[0]])}

    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor:
        return loss_of(self.top, embeddings["a"])


def fit_learned(ctx: hp.TrainerContext) -> tuple[Tensor, Tensor]:
    model = Learned()
    loop = hp.TrainerLoop(
        model, ctx, loss=as_it_is, dense_optimizer=dense_sgd,
        sparse_optimizer=hp.optim.SGD(lr=LR),
    )  # fmt: skip
    loop.fit(batches(ctx.rank))
    return model.rows("a"), model.scale.detach().clone()


def counting_hook(state, bucket):  # DDP reads annotations, and would take no strings
    """DDP's own all-reduce, counted."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    calls, group = state
    calls.append(1)
    return default_hooks.allreduce_hook(group, bucket)


def no_hook(_: object) -> tuple[None, None]:
    return None, None


def fit_with_hook(ctx: hp.TrainerContext) -> tuple[Outcome, int]:
    calls: list[int] = []
    outcome = fit_two(ctx, {"comm_hook": lambda group: ((calls, group), counting_hook)})
    return outcome, len(calls)


def scaler_of(ctx: hp.TrainerContext, overflow_at: int | None) -> Outcome:
    """Loss scaling; in one step trainer 1's loss overflows."""

    def loss(output: dict[str, Tensor], batch: Batch) -> Tensor:
        total = sum(output.values())
        if ctx.rank == 1 and batch.step == overflow_at:
            total = total * torch.tensor(float("inf"))
        return total

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    outcome = fit_two(ctx, {"loss": loss, "grad_scaler": scaler})
    return outcome._replace(notes=scaler.get_scale())


def freeze_and_thaw(ctx: hp.TrainerContext) -> list[Tensor]:
    """Rows of "b" after an epoch frozen from the start, one unfrozen, one frozen again."""
    model = Two()
    first, _ = model.specs
    model.specs = (first, spec("b", trainable=False))
    loop = hp.TrainerLoop(
        model, ctx, loss=as_it_is, dense_optimizer=dense_sgd,
        sparse_optimizer=hp.optim.Adam(lr=LR),
    )  # fmt: skip
    seen = [model.rows("b")]
    for change in (lambda: None, lambda: model.unfreeze("b"), lambda: model.freeze("b")):
        change()
        loop.fit(batches(ctx.rank))
        seen.append(model.rows("b"))
    return seen


def own_settings(ctx: hp.TrainerContext) -> tuple[list[tuple[tuple[str, ...], float]], Outcome]:
    """Table "a" has an optimizer of its own; a scheduler halves both rates after each step."""
    model = Two()
    _, second = model.specs
    model.specs = (spec("a", mode="sum", optimizer=hp.optim.Adagrad(lr=0.4)), second)
    optimizer = model.connect(ctx, hp.optim.SGD(lr=0.2))
    groups = [(group["tables"], group["lr"]) for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for batch in batches(ctx.rank):
        sum(model(model.lookup(batch), batch).values()).backward()
        optimizer.step()
        schedule.step()
    rows = {name: model.rows(name) for name in ("a", "b")}
    return groups, Outcome(rows, model.top.weight.detach(), None)  # type: ignore[arg-type]


def wrong_settings(ctx: hp.TrainerContext, options: dict[str, Any]) -> None:
    fit_two(ctx, options)


class Many(hp.HybridModel[Tensor]):
    def __init__(self, count: int) -> None:
        super().__init__(
            *(
                hp.RemoteEmbeddingSpec(
                    f"t{n}", num_embeddings=3 + n % 5, embedding_dim=2 + n % 3, mode="sum"
                )
                for n in range(count)
            )
        )

    def sparse_inputs(self, batch: Tensor) -> dict[str, Any]:
        return {spec.name: batch for spec in self.specs}

    def forward(self, embeddings: dict[str, Tensor], batch: Tensor) -> Tensor:
        return sum(value.sum() for value in embeddings.values())


def fit_many(ctx: hp.TrainerContext, count: int) -> tuple[int, bool]:
    model = Many(count)
    loop = hp.TrainerLoop(
        model, ctx, loss=as_it_is, dense_optimizer=dense_sgd,
        sparse_optimizer=hp.optim.Adagrad(lr=0.1),
    )  # fmt: skip
    before = model.rows(f"t{count - 1}")
    steps = loop.fit([torch.tensor([0, 2])] * 3).steps
    after = model.rows(f"t{count - 1}")
    return steps, bool((after[[0, 2]] != before[[0, 2]]).all() and torch.equal(after[1], before[1]))
