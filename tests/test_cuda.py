"""What needs a CUDA device; skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hybridpar as hp
import reference
import semantics as s
from scenarios import DIM, LR, dense_sgd, loss_of
from worlds import CASES, run_loop

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    "case", [CASES[0], CASES[4], CASES[8]], ids=lambda c: "-".join(map(str, c))
)
def test_a_dense_half_on_a_device_equals_plain_torch(case) -> None:
    trainers = min(2, torch.cuda.device_count())
    launcher = hp.RoleLauncher({"trainer": trainers, "ps": 2}, device="cuda")
    results = launcher.run(run_loop, (case, [10] * trainers))
    for got, wanted in zip(results, reference.train(case, [10] * trainers), strict=True):
        for name, rows in wanted.rows.items():
            torch.testing.assert_close(got.rows[name], rows, atol=1e-5, rtol=1e-4)


class Normed(hp.HybridModel[s.Batch]):
    def __init__(self) -> None:
        super().__init__(s.spec("a", mode="sum"))
        self.norm = nn.BatchNorm1d(DIM)
        self.top = nn.Linear(DIM, 3)

    def sparse_inputs(self, batch: s.Batch) -> dict[str, object]:
        return {"a": batch.a}

    def forward(self, embeddings: dict[str, Tensor], batch: s.Batch) -> Tensor:
        return loss_of(self.top, self.norm(embeddings["a"]))


def fit_sync_norm(ctx: hp.TrainerContext, counts: list[int]) -> Tensor:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Normed())
    loop = hp.TrainerLoop(
        model, ctx, loss=s.as_it_is, dense_optimizer=dense_sgd,
        sparse_optimizer=hp.optim.SGD(lr=LR),
    )  # fmt: skip
    loop.fit(s.batches(ctx.rank, counts[ctx.rank]), epochs=2)
    return model.norm.running_mean.cpu()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("counts", [[4, 4], [5, 2]], ids=str)
def test_sync_batch_norm_spans_the_trainers_of_a_step(counts: list[int]) -> None:
    launcher = hp.RoleLauncher({"trainer": 2, "ps": 1}, device="cuda")
    first, second = launcher.run(fit_sync_norm, (counts,))
    assert torch.equal(first, second)
