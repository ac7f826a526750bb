"""The two-tower and the sequence example: the same figures as their plain twins."""

from __future__ import annotations

import math

import pytest
import torch

from example_runs import module, run, shared

EPOCHS = 2
POPULARITY = 0.0859  # Recall@10 of showing everyone the most popular movies


@pytest.fixture
def movielens():
    return shared("HYBRIDPAR_MOVIELENS", "ml-100k")


@pytest.fixture
def made_up(tmp_path):
    """Files of MovieLens-100K's form: user u rated u + 3 movies, the highest number last."""
    ratings = [
        f"{user}\t{movie}\t3\t{100 + movie}"
        for user in (1, 2, 3)
        for movie in range(user + 3, 0, -1)
    ]
    movies = [f"{movie}|Name|||url|" + "|".join("01"[g == movie] for g in range(19))
              for movie in range(1, 9)]  # fmt: skip
    users = [f"{user}|{20 + user}|F|writer|0" for user in (1, 2, 3)]
    for name, rows in {"u.data": ratings, "u.item": movies, "u.user": users}.items():
        (tmp_path / name).write_text("\n".join(rows) + "\n", "latin-1")
    return module("movielens_history").Histories(tmp_path)


@pytest.mark.parametrize(
    ("example", "least"), [("two_tower", 1.2 * POPULARITY), ("sequence", 1.6 * POPULARITY)]
)
def test_twins_agree(movielens, example, least):
    options = [movielens, "--epochs", EPOCHS, "--trainers", 2]
    plain = run(f"{example}_plain", *options)
    ours = run(example, *options, "--servers", 2)
    assert len(ours) == len(plain) == EPOCHS
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine["train loss"] == pytest.approx(theirs["train loss"], rel=0, abs=1e-4)
        # One user of 943 may change places at a rounding.
        assert mine["Recall@10"] == pytest.approx(theirs["Recall@10"], rel=0, abs=2.5e-3)
        assert mine["NDCG@10"] == pytest.approx(theirs["NDCG@10"], rel=0, abs=2.5e-3)
    assert ours[-1]["Recall@10"] > least


def test_the_last_movie_is_taken_out(made_up):
    assert [history.tolist() for history in made_up.histories] == [
        [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]
    ]  # fmt: skip
    assert made_up.targets.tolist() == [4, 5, 6]
    assert made_up.popularity.tolist() == [0, 3, 3, 3, 2, 1, 0, 0, 0]


def test_places_count_unseen_movies_and_ties_against(made_up):
    scores = torch.tensor([9.0, 9, 9, 9, 5, 5, 7, 0, 0])
    # User 1 has movie 4 third (6 above, 5 beside); user 2 has 5 second; user 3 has 6 first.
    found = made_up.ranking(scores, k=2)
    assert found["Recall@2"] == pytest.approx(2 / 3)
    assert found["NDCG@2"] == pytest.approx((1 / math.log2(3) + 1) / 3)


@pytest.mark.parametrize("num_trainers", [1, 2, 3])
def test_shares_make_up_the_batches(made_up, num_trainers):
    ranks = range(num_trainers)
    for make in (made_up.pairs, lambda *args: made_up.windows(2, 4, *args)):
        whole = list(make(6, 0))
        shares = [list(make(6, 0, rank, num_trainers)) for rank in ranks]
        for batch, *parts in zip(whole, *shares, strict=True):
            field = "movies" if hasattr(batch, "movies") else "history"
            joined = torch.cat([getattr(part, field) for part in parts])
            assert joined.equal(getattr(batch, field))
    with pytest.raises(ValueError, match="batch of 6 cannot be shared evenly by 4"):
        next(made_up.pairs(6, 0, 0, 4))


def test_windows_tell_what_comes_next_and_pad_at_the_end(made_up):
    (windows,) = made_up.windows(3, 4, 4, epoch=0)
    rows = zip(windows.history.tolist(), windows.next.tolist(), strict=True)
    assert sorted(rows) == [
        ([1, 2, 3], [2, 3, 0]),
        ([1, 2, 3], [2, 3, 4]),
        ([1, 2, 3], [2, 3, 4]),
        ([4, 5, 0], [5, 0, 0]),
    ]
    latest = made_up.latest(4)
    assert latest.history.tolist() == [[1, 2, 3, 0], [1, 2, 3, 4], [2, 3, 4, 5]]
    assert latest.next.tolist() == [[0, 0, 4, 0], [0, 0, 0, 5], [0, 0, 0, 6]]
    assert latest.negatives.tolist() == list(range(9))


def test_in_batch_softmax_leaves_out_the_same_movie_and_corrects_for_popularity():
    plain = module("two_tower_plain")
    batch = module("movielens_history").Pairs(
        *[torch.empty(0)] * 2,
        movies=torch.tensor([5, 6, 5]),
        genres=torch.empty(0),
        genre_offsets=torch.empty(0),
        log_q=torch.tensor([0.5, 0.25, 0.5]).log(),
    )
    scores = torch.tensor([[0.1, 0.2, 0.3], [0.0, 0.1, -0.1], [0.2, 0.0, 0.1]])
    logits = scores / plain.TEMPERATURE - batch.log_q
    rows = [logits[0, :2], logits[1], logits[2, 1:]]  # the other of movies 0 and 2 is left out
    own = [0, 1, 1]
    expected = -sum(row.log_softmax(0)[at] for row, at in zip(rows, own, strict=True)) / 3
    assert plain.loss(scores, batch) == pytest.approx(float(expected), abs=1e-6)


def test_attention_sees_nothing_later(made_up):
    plain = module("sequence_plain")
    dense = plain.Attention()
    batch = made_up.latest(plain.LENGTH)
    batch = batch._replace(next=(batch.history != 0).long())
    rows = torch.randn(len(made_up.targets), plain.LENGTH, plain.DIM)
    ahead = rows.clone()
    ahead[:, 2:] += torch.randn(plain.DIM)
    embeddings = {"next": rows, "negatives": torch.randn(5, plain.DIM)}
    with torch.no_grad():
        scores = dense({**embeddings, "history": rows}, batch)
        changed = dense({**embeddings, "history": ahead}, batch)
    places = (batch.history != 0).nonzero()[:, 1]
    assert torch.allclose(scores[places < 2], changed[places < 2], atol=1e-6)
    assert not torch.allclose(scores[places == 2], changed[places == 2], atol=1e-3)


@pytest.mark.parametrize(
    "example", ["movielens", "dlrm", "two_tower", "sequence", "movielens_plain", "dlrm_plain",
                "two_tower_plain", "sequence_plain"],
)  # fmt: skip
def test_every_example_explains_itself(example, capsys):
    with pytest.raises(SystemExit) as end:
        run(example, "--help")
    assert end.value.code == 0
    assert "usage" in capsys.readouterr().out
