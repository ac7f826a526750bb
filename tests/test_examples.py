"""The example twins: the same test AUCs with hybridpar as in one plain torch process."""

import importlib
import re
import sys

import pytest
import torch

from example_runs import EXAMPLES, shared
from warm_scripts import run_script

EPOCHS = 3
SENSIBLE_AUC = 0.765  # 0.775 after three epochs; 0.5 is chance
TIMEOUT_S = 50


def run(example, *arguments):
    return run_script(EXAMPLES / example, *arguments, timeout_s=TIMEOUT_S)


def aucs(example, *arguments):
    done = run(example, *arguments, "--epochs", EPOCHS)
    assert done.returncode == 0, done.stderr
    return [float(value) for value in re.findall(r"^epoch \d+: test AUC (\S+)$", done.stdout, re.M)]


@pytest.fixture(scope="module")
def movielens():
    return shared("HYBRIDPAR_MOVIELENS", "ml-100k")


@pytest.fixture(scope="module")
def plain_aucs(movielens):
    return aucs("movielens_plain.py", movielens)


@pytest.fixture
def movielens_data(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module("movielens_data")
    del sys.modules["movielens_data"]


@pytest.fixture
def made_up(tmp_path):
    """Files of MovieLens-100K's format: 5 users, 4 movies, and every user's rating of each."""
    ratings = [f"{u + 1}\t{m + 1}\t{(u + m) % 5 + 1}\t0" for u in range(5) for m in range(4)]
    genres = [["1" if g == m or g == 7 else "0" for g in range(19)] for m in range(4)]
    movies = [f"{m + 1}|Caf\u00e9|||url|{'|'.join(has)}" for m, has in enumerate(genres)]
    users = [f"{u + 1}|{20 + u}|F|writer|0" for u in range(5)]
    for name, rows in {"u.data": ratings, "u.item": movies, "u.user": users}.items():
        (tmp_path / name).write_text("\n".join(rows) + "\n", "latin-1")
    return tmp_path


@pytest.mark.parametrize(("trainers", "servers"), [(1, 1), (2, 1), (3, 2)])
def test_twins_print_the_same_aucs(movielens, plain_aucs, trainers, servers):
    ours = aucs("movielens.py", movielens, "--trainers", trainers, "--servers", servers)
    assert len(ours) == len(plain_aucs) == EPOCHS
    side_by_side = [f"{p:.5f} {h:.5f}" for p, h in zip(plain_aucs, ours, strict=True)]
    print("plain   hybridpar", *side_by_side, sep="\n")
    assert ours == pytest.approx(plain_aucs, rel=0, abs=1e-4)
    assert ours[-1] > SENSIBLE_AUC


@pytest.mark.parametrize("example", ["movielens.py", "movielens_plain.py"])
def test_missing_files_are_named_with_their_source(example, tmp_path):
    done = run(example, tmp_path)
    assert done.returncode != 0
    last_line = done.stderr.splitlines()[-1]
    assert f"{tmp_path / 'u.data'} is missing" in last_line
    assert "https://grouplens.org/datasets/movielens/100k/" in last_line
    assert "forbids passing it on" in last_line


@pytest.mark.parametrize("num_trainers", [1, 2, 3])
def test_shares_make_up_the_plain_batches(movielens_data, made_up, num_trainers):
    data = movielens_data.MovieLens(made_up)
    for epoch in range(2):
        whole = list(data.batches(6, epoch))
        shares = [list(data.batches(6, epoch, rank, num_trainers)) for rank in range(num_trainers)]
        assert len(whole) == 2  # of 16 train samples
        for batch, *parts in zip(whole, *shares, strict=True):
            for name in ("users", "movies", "genres", "ages", "labels"):
                joined = torch.cat([getattr(part, name) for part in parts])
                assert joined.equal(getattr(batch, name))
    assert not next(data.batches(6, 0)).users.equal(next(data.batches(6, 1)).users)


def test_a_bag_holds_its_movies_genres(movielens_data, made_up):
    test = movielens_data.MovieLens(made_up).test
    bags = torch.tensor_split(test.genres, test.genre_offsets[1:])
    assert [bag.tolist() for bag in bags] == [[movie, 7] for movie in test.movies.tolist()]


def test_uneven_shares_are_refused(movielens_data, made_up):
    with pytest.raises(ValueError, match="batch of 6 cannot be shared evenly by 4"):
        next(movielens_data.MovieLens(made_up).batches(6, 0, 0, 4))


def test_auc_counts_every_pair_and_halves_ties(movielens_data):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(6, (40,), generator=generator).float()
    labels = torch.randint(2, (40,), generator=generator).float()
    above = scores[labels == 1].unsqueeze(1) - scores[labels == 0]
    by_pairs = ((above > 0).double() + (above == 0).double() / 2).mean()
    assert movielens_data.auc(scores, labels) == pytest.approx(float(by_pairs), abs=1e-12)


@pytest.mark.parametrize("options", [["async"], ["bounded", "--staleness", 2]], ids=str)
def test_updates_on_arrival_reach_the_same_auc(movielens, plain_aucs, options):
    """Sync mode's AUC is the plain twin's, shown above."""
    ours = aucs("movielens.py", movielens, "--servers", 2, "--consistency", *options)
    assert ours[-1] == pytest.approx(plain_aucs[-1], rel=0, abs=0.005)
