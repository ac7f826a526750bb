"""Writing rows of tables from outside: every sharding, in pieces, beside a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import handed
import hybridpar as hp
from handed import DIM, ROWS, written_ids, written_values
from hybridpar.checkpoint.files import map_rows
from hybridpar.server.slab import Slab
from hybridpar.sharding import SlabKind, SlabLayout, SlabPart

CLOSE = {"atol": 1e-6, "rtol": 1e-6}


@pytest.fixture(scope="module", params=["sync", "async"])
def results(request: pytest.FixtureRequest) -> list[handed.Written]:
    roles = hp.Roles(trainers=2, servers=2)
    return hp.launch(handed.write, roles=roles, args=(request.param,))


def test_rows_are_as_written_and_others_as_they_were(results: list[handed.Written]) -> None:
    for result in results:
        for name, before in result.before.items():
            expected = before.clone()
            for rank in (0, 1):
                expected[written_ids(rank)] = written_values(rank)
            if name == "half":
                expected = expected.half().float()
            if name == "padded":
                expected[5] = 0.0
            torch.testing.assert_close(result.after[name], expected, rtol=0.0, atol=0.0)


def test_state_begins_anew_or_stays(results: list[handed.Written]) -> None:
    for result in results:
        for name, before in result.state_before.items():
            expected = before.clone()
            expected[written_ids(0)] = 0.0
            assert expected[written_ids(1)].count_nonzero() > 0
            torch.testing.assert_close(result.state_after[name], expected, rtol=0.0, atol=0.0)


def test_max_norm_scales_at_the_next_lookup(results: list[handed.Written]) -> None:
    for result in results:
        assert float(result.after["norm"].norm(dim=1).max()) > 10
        assert float(result.looked_up.norm(dim=1).max()) <= 1 + 1e-5


def test_training_goes_on_from_what_was_written(results: list[handed.Written]) -> None:
    for result in results:
        moved = (result.trained["row"] - result.after["row"]).abs()
        assert 0 < float(moved.max()) <= 0.1 + 1e-6  # Adagrad's step is at most the rate
        assert torch.equal(result.trained["row"], results[0].trained["row"])


def test_refused(results: list[handed.Written]) -> None:
    for result in results:
        for message, wanted in zip(
            result.messages,
            [
                "SpecError: No table is named 'nothing'",
                "got id 1 more than once. Give every id once",
                "got id 29, but num_embeddings of table 'row' is 29",
                "got the negative id -1",
                "got values (2, 5) for 2 ids. Give a tensor of shape (2, 4)",
                "got values (3, 4) for 2 ids",
                "got values of dtype torch.int64. Give floats",
                "has dtype torch.float32. Give int64 or int32",
                "got ids (1, 2). Give a 1-D tensor",
                "got values list for 2 ids",
            ],
            strict=True,
        ):
            assert wanted in message


def test_a_checkpoint_under_way_keeps_the_rows_of_its_moment(tmp_path: Path) -> None:
    spec = hp.RemoteEmbeddingSpec(
        "t", num_embeddings=ROWS, embedding_dim=DIM, seed=1, optimizer=hp.optim.Adagrad(lr=0.1)
    )
    kind = SlabKind(DIM, torch.float32, hp.optim.Adagrad(lr=0.1), None, 2.0, "")
    slab = Slab(SlabLayout(kind, (SlabPart("t", 0, 1, 0, 0, ROWS),)), {"t": spec}, "0")
    before = slab.weight.clone()
    slab.state["sum"].fill_(7.0)
    slab.hold(touched_only=False, track=False)
    ids = torch.tensor([3, 28])
    slab.set_rows(ids, torch.ones(2, DIM), reset_state=True)
    (entry,) = slab.write(tmp_path, "slab")
    saved = map_rows(tmp_path, entry.files["weight"], DIM, torch.float32)
    assert torch.equal(saved, before)
    state = map_rows(tmp_path, entry.files["sum"], DIM, torch.float32)
    assert torch.equal(state, torch.full((ROWS, DIM), 7.0))
    assert torch.equal(slab.weight[ids], torch.ones(2, DIM))
    assert slab.state["sum"][ids].count_nonzero() == 0
