"""Train functions of test_evaluation. Imports no test tool."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hybridpar as hp
from hosted import Tower
from hybridpar.metrics import AUC, Accuracy, BinnedAUC, Metric
from saved import make_loop
from scenarios import DIM
from worlds import Batch, batches_of, make_batch

ALL = [make_batch(seed, bags=True, size=3 + seed % 4) for seed in range(9)]
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"consistency": "async"},
    "bounded": {"consistency": "bounded", "staleness": 0},
    "bfloat16": {"autocast": torch.bfloat16},
}


def share(ctx: hp.TrainerContext, everything: list[Any]) -> list[Any]:
    """Every trainer's part, the last of several has none."""
    sharing = max(1, ctx.num_trainers - 1)
    return everything[ctx.rank :: sharing] if ctx.rank < sharing else []


def class_0(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return output.softmax(1)[:, 0], (batch.label == 0).long()


class Found(NamedTuple):
    results: dict[str, float]
    plain_loss: float
    untouched: bool


def every_mode(ctx: hp.TrainerContext) -> dict[str, Found]:
    return {name: evaluate(ctx, **options) for name, options in MODES.items()}


def evaluate(ctx: hp.TrainerContext, **options: Any) -> Found:
    """Evaluate an untrained model, by the loop and in plain torch."""
    loop = make_loop(ctx, None, **options)
    loop.model.top.eval()  # somebody's own idea, to be found again
    before = state_of(loop)
    results = loop.evaluate(
        share(ctx, ALL), metrics={"accuracy": Accuracy(), "auc": AUC()}, inputs=class_0
    )
    plain = loop.model.export().eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled="autocast" in options):
        losses = [F.cross_entropy(plain(batch), batch.label, reduction="sum") for batch in ALL]
    count = sum(len(batch.label) for batch in ALL)
    return Found(results, float(sum(losses)) / count, state_of(loop) == before)


def state_of(loop: hp.TrainerLoop[Any]) -> tuple[Any, ...]:
    """What an evaluation must not change."""
    model = loop.model
    return (
        model.rows("item").tolist(),
        [module.training for module in model.modules()],
        [parameter.grad is None for parameter in model.parameters()],
        {table: dict(c) for table, c in model._connected_exchange.staleness.items()},
        torch.get_rng_state().tolist(),
        random.getstate(),
    )


class Hosting(hp.HybridModel[Batch]):
    """Dropout and running averages on the trainer and on the server; a table with max_norm."""

    def __init__(self, *, norm: bool, dropout: float = 0.5, max_norm: float | None = None) -> None:
        torch.manual_seed(3)
        tower = Normed if norm else Tower
        super().__init__(
            hp.RemoteEmbeddingSpec(
                "tower", module=tower, args=(2,), kwargs={"dropout": dropout}, seed=1,
                optimizer=torch.optim.SGD,
            ),
            hp.RemoteEmbeddingSpec(
                "user", num_embeddings=23, embedding_dim=8, seed=2, max_norm=max_norm
            ),
        )  # fmt: skip
        self.drop = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(8 + DIM)
        self.top = nn.Linear(8 + DIM, 3)

    def sparse_inputs(self, batch: Batch) -> dict[str, Any]:
        return {"tower": batch.words.float(), "user": batch.users}

    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor:
        both = torch.cat([embeddings["user"], embeddings["tower"]], dim=1)
        return self.top(self.drop(self.norm(both)))


class Normed(Tower):
    def __init__(self, in_features: int, *, dropout: float) -> None:
        super().__init__(in_features, dropout=dropout)
        self.layers.insert(0, nn.BatchNorm1d(in_features))


def hosting_loop(ctx: hp.TrainerContext, **options: Any) -> hp.TrainerLoop[Batch]:
    return hp.TrainerLoop(
        Hosting(**options), ctx, loss=lambda output, batch: F.cross_entropy(output, batch.label),
        dense_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        sparse_optimizer=hp.optim.SGD(lr=0.1),
    )  # fmt: skip


def hosted_modules(ctx: hp.TrainerContext) -> tuple[bool, bool, bool]:
    """Whether evaluations agree, running averages stay, and training mode is found again."""
    loop = hosting_loop(ctx, norm=True)
    loop.fit(ALL[:3])
    before = loop.model.module_state_dict("tower")
    agree = loop.evaluate(ALL) == loop.evaluate(ALL)
    after = loop.model.module_state_dict("tower")
    first, second = (loop.model.lookup(ALL[0])["tower"] for _ in range(2))
    return agree, all(torch.equal(before[n], after[n]) for n in before), torch.equal(first, second)


def scaled_rows(ctx: hp.TrainerContext) -> tuple[Tensor, Tensor]:
    """Rows of a table with max_norm after an evaluation, and torch's after the same lookups."""
    loop = hosting_loop(ctx, norm=False, max_norm=1.0)
    plain = nn.Embedding.from_pretrained(loop.model.rows("user"), max_norm=1.0)
    loop.evaluate(ALL)
    for batch in ALL:
        plain(batch.users)
    return loop.model.rows("user"), plain.weight


def running_averages(ctx: hp.TrainerContext) -> tuple[list[dict[str, float]], bool]:
    """Results with all batches on one trainer, then on another; whether averages are as before."""
    loop = hosting_loop(ctx, norm=False)
    loop.fit(batches_of(ctx.rank, 3, bags=True))
    own = loop.model.norm.running_mean.clone()
    results = [loop.evaluate(ALL if ctx.rank == rank else []) for rank in range(ctx.num_trainers)]
    return results, torch.equal(own, loop.model.norm.running_mean)


class Drawing:
    """Batches to evaluate whose order is drawn from the generators that training draws from."""

    def __init__(self, rank: int) -> None:
        self._batches = ALL[rank::2]

    def __iter__(self) -> Iterator[Batch]:
        random.random()
        for index in torch.randperm(len(self._batches)).tolist():
            yield self._batches[index]


def train(ctx: hp.TrainerContext, evaluates: bool) -> list[Tensor]:
    """All that is trained, with evaluations or without."""
    options: dict[str, Any] = {}
    if evaluates:
        options = {"eval_batches": Drawing(ctx.rank), "eval_every": 2}
    loop = hosting_loop(ctx, norm=False)
    torch.manual_seed(7 + ctx.rank)
    loop.fit(batches_of(ctx.rank, (6, 5)[ctx.rank], bags=True), epochs=2, **options)
    states = *loop.model.module_state_dict("tower").values(), *loop.model.state_dict().values()
    return [loop.model.rows("user"), *states]


def refusals(ctx: hp.TrainerContext) -> list[str]:
    """The messages of evaluations that cannot be; then one that can."""
    loop = make_loop(ctx, None)
    metrics: dict[str, Metric] = {"auc": AUC()}
    ask: list[tuple[dict[str, Any], str]] = [
        ({"batches": []}, "evaluate"),
        ({"batches": ALL, "metrics": metrics}, "evaluate"),
        ({"batches": ALL, "metrics": {"loss": AUC()}, "inputs": class_0}, "evaluate"),
        ({"batches": ALL, "metrics": {"auc": 1}, "inputs": class_0}, "evaluate"),
        ({"batches": ALL, "metrics": {f"m{ctx.rank}": AUC()}, "inputs": class_0}, "evaluate"),
        (
            {"batches": ALL, "metrics": {"m": BinnedAUC(2 + ctx.rank)}, "inputs": class_0},
            "evaluate",
        ),
        ({"eval_every": 2, "metrics": metrics}, "fit"),
        ({"eval_batches": iter(ALL)}, "fit"),
        ({"eval_batches": ALL, "eval_every": 0}, "fit"),
        ({"eval_batches": ALL if ctx.rank else None}, "fit"),
        ({"eval_batches": ALL, "eval_every": 2 + ctx.rank}, "fit"),
        ({"eval_batches": ALL, "early_stopping": hp.EarlyStopping(monitor="auc")}, "fit"),
        ({"eval_batches": ALL, "early_stopping": hp.EarlyStopping(restore_best=True)}, "fit"),
    ]
    messages = []
    for options, what in ask:
        given = (batches_of(ctx.rank, 3, bags=True),) if what == "fit" else ()
        messages.append(message_of(getattr(loop, what), *given, **options))
    loop.fit(batches_of(ctx.rank, 3, bags=True), eval_batches=ALL)
    return messages


def message_of(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except hp.HybridParError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def by_samples(ctx: hp.TrainerContext) -> tuple[float, float]:
    """The loss of an evaluation in which every batch is said to have one sample; the mean."""
    loop = make_loop(ctx, None, samples=lambda batch: 1)
    plain = loop.model.export().eval()
    with torch.no_grad():
        losses = [float(F.cross_entropy(plain(batch), batch.label)) for batch in ALL]
    return loop.evaluate(ALL)["loss"], sum(losses) / len(losses)


def resume_apart(ctx: hp.TrainerContext, folder: str) -> str:
    """What is said if a trainer does not see the checkpoints that another one does."""
    make_loop(ctx, hp.Checkpoint(folder)).fit(batches_of(ctx.rank, 2, bags=True))
    own = hp.Checkpoint(folder if ctx.rank == 0 else f"{folder}/elsewhere")
    batches = batches_of(ctx.rank, 2, bags=True)
    return message_of(make_loop(ctx, own).fit, batches, resume=True)


def fail_on_one(ctx: hp.TrainerContext) -> None:
    loop = make_loop(ctx, None)
    bad = [batch._replace(users=batch.users + 1000) for batch in ALL[:1]]
    loop.evaluate(bad if ctx.rank == 1 else ALL)


def when(ctx: hp.TrainerContext, directory: str, counts: list[int]) -> list[list[tuple[int, int]]]:
    """When fits evaluate, in steps and epochs."""
    found = []
    for consistency in ("sync", "async"):
        for every in (2, None):
            checkpoint = hp.Checkpoint(f"{directory}/{consistency}{every}", every=5)
            loop = make_loop(ctx, checkpoint, consistency=consistency)
            ctx.step = 0  # or else it counts on from the last loop
            result = loop.fit(
                batches_of(ctx.rank, counts[ctx.rank], bags=True), epochs=2, eval_every=every,
                eval_batches=share(ctx, ALL),
            )  # fmt: skip
            found.append([(each.step, each.epoch) for each in result.evaluations])
            assert not result.stopped_early
    return found
