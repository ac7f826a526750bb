"""Train functions that once went wrong. Imports no test tool."""

from __future__ import annotations

import resource
import time
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hybridpar as hp
import semantics as s
from scenarios import DIM, LR, ROWS, bags, dense_sgd


class Wide(hp.HybridModel[Tensor]):
    """Rows of ones' gradients, as many and as wide as asked for."""

    def __init__(self, rows: int, dim: int, **more: Any) -> None:
        super().__init__(
            hp.RemoteEmbeddingSpec(
                "t", num_embeddings=rows, embedding_dim=dim, **{"init": nn.init.zeros_} | more
            )
        )

    def sparse_inputs(self, batch: Tensor) -> dict[str, Any]:
        return {"t": batch}

    def forward(self, embeddings: dict[str, Tensor], batch: Tensor) -> Tensor:
        return embeddings["t"].sum()


def push_and_return(ctx: hp.TrainerContext) -> float:
    """Trainer 1 returns with its last pushes on their way; trainer 0 reads when it is gone."""
    model = Wide(10_000, 64)
    optimizer = model.connect(ctx, hp.optim.SGD(lr=1.0), consistency="async", scale_gradients=False)
    everything = torch.arange(10_000)
    if ctx.rank == 1:
        for _ in range(3):
            model(model.lookup(everything), everything).backward()
            optimizer.step()
        return 0.0
    limit = time.monotonic() + 10
    while model.rows("t", torch.tensor([9_999]))[0, 0] > -3 and time.monotonic() < limit:
        time.sleep(0.05)
    return float(model.rows("t").sum())


def much_both_ways(ctx: hp.TrainerContext, consistency: str, accumulate: int) -> int:
    """Each batch and each answer are far larger than a connection's buffers."""
    model = Wide(60_000, 128)
    loop = hp.TrainerLoop(
        model, ctx, loss=s.as_it_is, dense_optimizer=dense_sgd,
        sparse_optimizer=hp.optim.SGD(lr=1.0), consistency=consistency, accumulate=accumulate,
    )  # fmt: skip
    return loop.fit([torch.arange(60_000)] * 4).steps


def two_uneven_epochs(
    ctx: hp.TrainerContext, options: dict[str, Any]
) -> tuple[Tensor, list[float]]:
    """The dense half, the loss scale and the rates after an uneven epoch and an even one."""
    scaler = None
    if options.pop("scaled", False):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        options["grad_scaler"] = scaler
    if options.pop("hooked", False):
        options["comm_hook"] = lambda group: (([], group), s.counting_hook)
    if options.pop("scheduled", False):
        options["schedulers"] = lambda *both: [
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5) for optimizer in both
        ]
    model = s.Two()
    loop = hp.TrainerLoop(
        model, ctx, loss=s.as_it_is, dense_optimizer=dense_sgd,
        **{"sparse_optimizer": hp.optim.SGD(lr=LR)} | options,
    )  # fmt: skip
    counts = [[5, 2, 4], [3, 3, 3]]
    for count in counts:
        loop.fit(s.batches(ctx.rank, count[ctx.rank]))
    rates = [g["lr"] for o in (loop.dense_optimizer, loop.sparse_optimizer) for g in o.param_groups]
    return model.top.weight.detach().clone(), [scaler.get_scale() if scaler else 1.0, *rates]


def mixed_loops(ctx: hp.TrainerContext, staleness: int) -> tuple[int, list[int]]:
    """Bounded: fits, lookups between them, and steps by hand before and after."""
    model = s.Counting()
    loop = hp.TrainerLoop(
        model, ctx, loss=s.as_it_is, dense_optimizer=dense_sgd,
        sparse_optimizer=hp.optim.SGD(lr=1.0), consistency="bounded", staleness=staleness,
        scale_gradients=False,
    )  # fmt: skip
    optimizer, total = loop.sparse_optimizer, 0

    def by_hand(count: int) -> None:
        for batch in s.count_ids(ctx.rank, count):
            model(model.lookup(batch), batch).backward()
            optimizer.step()
            time.sleep(0.003 * ctx.rank)

    by_hand(6)
    for _ in range(2):
        loop.fit(s.count_ids(ctx.rank, 5))
        if ctx.rank == 0:
            for batch in s.count_ids(0, 3):
                model.lookup(batch)  # with gradients, in training mode: a user forgot
    by_hand(20)
    model.rows("t")
    torch.distributed.barrier()
    total = int(-model.rows("t")[:, 0].sum())
    return total, sorted(model._exchange.staleness["t"])


def long_tail(ctx: hp.TrainerContext, consistency: str) -> int:
    """Trainer 1 has no data for longer than the limit, while trainer 0 works on."""
    model = s.Counting()
    loop = hp.TrainerLoop(
        model, ctx, loss=s.as_it_is, dense_optimizer=dense_sgd,
        sparse_optimizer=hp.optim.SGD(lr=1.0), consistency=consistency,
    )  # fmt: skip

    def slow():
        for batch in s.count_ids(ctx.rank, 12 if ctx.rank == 0 else 1):
            time.sleep(0.3 if ctx.rank == 0 else 0.0)
            yield batch

    return loop.fit(slow()).steps


class CannotSayError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def go_wrong(ctx: hp.TrainerContext, how: str) -> None:
    """Trainer 1 fails in an odd way while the others wait for it."""
    if ctx.rank == 1:
        if how == "cycle":
            error = KeyError("around")
            raise error from error
        if how == "gloo":
            raise RuntimeError("cannot open gloo_features.pt")
        if how == "silent":
            raise CannotSayError
    torch.distributed.barrier()


class FailsOnServer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError("on the server")


class Hosting(hp.HybridModel[Tensor]):
    def __init__(self, module: Any, *args: Any) -> None:
        super().__init__(
            hp.RemoteEmbeddingSpec("m", module=module, args=args, optimizer=torch.optim.SGD)
        )

    def sparse_inputs(self, batch: Tensor) -> dict[str, Any]:
        return {"m": batch}

    def forward(self, embeddings: dict[str, Tensor], batch: Tensor) -> Tensor:
        return embeddings["m"].sum()


def server_fails_while_others_work(ctx: hp.TrainerContext) -> None:
    model = Hosting(FailsOnServer)
    model.connect(ctx)
    if ctx.rank == 0:
        time.sleep(20)  # busy with something else: it sees nothing of it
    model.lookup(torch.ones(2))


def many_unused_graphs(ctx: hp.TrainerContext) -> int:
    """Lookups with gradients that no backward pass follows; how many graphs the server keeps."""
    model = Hosting(CountsGraphs, 64)
    model.connect(ctx)
    for _ in range(50):
        model.lookup(torch.randn(2000, 64))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert before > 0
    return int(model.lookup(torch.randn(1, 64))["m"][0, 0])


class CountsGraphs(nn.Module):
    """Its output says how many tensors with a graph of its own kind are alive."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        import gc

        alive = sum(  # isinstance would wake a deprecated object of torch's, which warns
            issubclass(type(o), Tensor) and o.grad_fn is not None and o.shape == (2000, 64)
            for o in gc.get_objects()
        )
        return self.layer(x) * 0 + alive


def draws(ctx: hp.TrainerContext) -> Tensor:
    """Dropout on a server, several trainers at once."""
    torch.manual_seed(5)
    model = Hosting(nn.Dropout, 0.5)
    model.connect(ctx)
    return torch.cat([model.lookup(torch.ones(50))["m"] for _ in range(5)])


def changed_in_place(ctx: hp.TrainerContext, sharding: str) -> Tensor:
    model = Wide(ROWS, DIM, sharding=sharding, init=nn.init.ones_)
    optimizer = model.connect(ctx, hp.optim.SGD(lr=1.0))
    F.relu(model.lookup(torch.tensor([1, 2]))["t"], inplace=True).sum().mul(2).backward()
    optimizer.step()
    return model.rows("t", torch.tensor([0, 1, 2]))[:, 0]


class Shadowing(Wide):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.embed = nn.Linear(2, 2)  # free to use
        self.plan = nn.Linear(2, 2)


def shadow(ctx: hp.TrainerContext) -> None:
    Shadowing()


class Restless(s.Learned):
    def sparse_inputs(self, batch: Any) -> dict[str, Any]:
        ids, offsets = bags(torch.Generator().manual_seed(int(torch.randint(10**6, ()))))
        return {"a": (ids, offsets, self.scale[ids])}


def restless_inputs(ctx: hp.TrainerContext) -> None:
    loop = hp.TrainerLoop(
        Restless(), ctx, loss=s.as_it_is, dense_optimizer=dense_sgd,
        sparse_optimizer=hp.optim.SGD(lr=LR),
    )  # fmt: skip
    loop.fit(s.batches(ctx.rank))


def cut_short(ctx: hp.TrainerContext) -> Tensor:
    """A fit that the user's loss ends; then another. No gradient of the first is left over."""
    model = Wide(4, 2)

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        if int(batch[0]) == 3:
            output.backward()
            raise StopAsyncIteration
        return output

    loop = hp.TrainerLoop(
        model, ctx, loss=loss, dense_optimizer=dense_sgd, sparse_optimizer=hp.optim.SGD(lr=1.0)
    )
    with suppress(StopAsyncIteration):
        loop.fit([torch.tensor([3])])
    loop.fit([torch.tensor([1])])
    return model.rows("t")[:, 0]


def two_models(ctx: hp.TrainerContext) -> tuple[bool, bool]:
    """Twins start from other values; freed tables are gone."""
    torch.manual_seed(1)
    first, second = Wide(9, 2, init=None), Wide(9, 2, init=None)
    first.connect(ctx, hp.optim.SGD())
    second.connect(ctx, hp.optim.SGD())
    differ = not torch.equal(first.rows("t"), second.rows("t"))
    second.disconnect()
    first.rows("t")
    try:
        second.rows("t")
    except hp.HybridParError as error:
        return differ, "has no tables yet" in str(error)
    return differ, False


def xavier(ctx: hp.TrainerContext) -> None:
    Wide(400_000, 8, init=nn.init.xavier_uniform_).connect(ctx, hp.optim.SGD())


def scheduled(ctx: hp.TrainerContext) -> Tensor:
    """Three steps under a schedule that tenfolds the rate down: 1, 0.1, 0.01."""
    model = Wide(3, 2)
    loop = hp.TrainerLoop(
        model, ctx, loss=s.as_it_is, dense_optimizer=dense_sgd,
        sparse_optimizer=hp.optim.SGD(lr=1.0),
        schedulers=lambda dense, sparse: [
            torch.optim.lr_scheduler.ExponentialLR(sparse, gamma=0.1)
        ],
    )  # fmt: skip
    loop.fit([torch.tensor([1])] * 3)
    return model.rows("t")[:, 0]


class Shared(hp.HybridModel[Tensor]):
    def __init__(self) -> None:
        super().__init__(
            hp.RemoteEmbeddingSpec(
                "t", num_embeddings=5, embedding_dim=2, features=("x", "y"),
                sharding="row_wise", init=nn.init.zeros_,
            )
        )  # fmt: skip

    def sparse_inputs(self, batch: Tensor) -> dict[str, Any]:
        return {"x": batch, "y": batch + 1} if int(batch[0]) else {"y": batch + 1}

    def forward(self, embeddings: dict[str, Tensor], batch: Tensor) -> Tensor:
        return sum((1 + number) * embeddings[name].sum() for number, name in enumerate(embeddings))


def shared_table(ctx: hp.TrainerContext) -> Tensor:
    model = Shared()
    loop = hp.TrainerLoop(
        model, ctx, loss=s.as_it_is, dense_optimizer=dense_sgd,
        sparse_optimizer=hp.optim.SGD(lr=1.0),
    )  # fmt: skip
    loop.fit([torch.tensor([1, 2]), torch.tensor([0, 3])])
    return model.rows("t")[:, 0]


def hosted_async(ctx: hp.TrainerContext) -> Tensor:
    """A bias that gets a gradient of one a sample, pushed on arrival."""
    model = Hosting(nn.Linear, 2, 1)
    loop = hp.TrainerLoop(
        model, ctx, loss=s.as_it_is, dense_optimizer=dense_sgd, consistency="async"
    )
    before = model.module_state_dict("m")["bias"]
    loop.fit([torch.zeros(3, 2)] * 4)
    torch.distributed.barrier()
    return model.module_state_dict("m")["bias"] - before


def unknown_state(ctx: hp.TrainerContext) -> str:
    """A mistake that the user catches ends nothing."""
    model = Wide(9, 2, sharding="row_wise")
    optimizer = model.connect(ctx, hp.optim.Adam())
    try:
        optimizer.state_of("t", "sum")
    except hp.SpecError as error:
        return str(error)
    return ""


def counted_lookups(ctx: hp.TrainerContext, consistency: str) -> int:
    """How many batches' staleness is counted where two make a step."""
    loop = hp.TrainerLoop(
        Wide(9, 2), ctx, loss=s.as_it_is, dense_optimizer=dense_sgd, accumulate=2,
        sparse_optimizer=hp.optim.SGD(), consistency=consistency,
    )  # fmt: skip
    return sum(loop.fit([torch.tensor([1])] * 6).staleness["t"].values())
