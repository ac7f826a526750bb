"""MovieLens-100K for both twins: samples, batches, and the area under the ROC curve.

A sample is a user, a movie with its genres, and whether the user gave it at least four stars.

Shapes: B samples, N genres of all of them together.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

FILES = ("u.data", "u.item", "u.user")
NUM_GENRES = 19
LIKED = 4  # stars, of five
TEST_SHARE = 0.2
SEED = 0


class Batch(NamedTuple):
    """Samples side by side; bag b of ``genres`` begins at ``genre_offsets[b]``."""

    users: Tensor  # (B,) int64
    movies: Tensor  # (B,) int64
    genres: Tensor  # (N,) int64
    genre_offsets: Tensor  # (B,) int64
    ages: Tensor  # (B, 1) float32: the users', in centuries
    labels: Tensor  # (B,) float32: 1 if liked, else 0


class MovieLens:
    """The data set, split into train and test samples.

    A seeded permutation decides which fifth of the ratings is for testing. Most users of this data
    set rated for a day or two: split by date, 85 % of the test ratings would come from users whom
    training never saw, and the AUC would measure untrained rows. With 20,000 test samples its
    standard error is about 0.003.

    Args:
        path: the directory with u.data, u.item and u.user, as GroupLens publishes them.

    Raises:
        FileNotFoundError: if one of them is missing.
    """

    def __init__(self, path: str) -> None:
        ratings, movies, users = (rows_of(Path(path), name) for name in FILES)
        self.num_users, self.num_movies = len(users), len(movies)
        self._has_genre = torch.tensor([[int(x) for x in row[-NUM_GENRES:]] for row in movies])
        self._ages = torch.tensor([[int(row[1]) / 100] for row in users])
        table = torch.tensor([[int(x) for x in row[:3]] for row in ratings])
        table = table[torch.randperm(len(table), generator=seeded(SEED))]
        num_test = int(TEST_SHARE * len(table))
        self._test = table[:num_test]
        self.test = self._batch(self._test)
        self._train = table[num_test:]

    def batches(
        self, size: int, epoch: int, rank: int = 0, num_trainers: int = 1
    ) -> Iterator[Batch]:
        """One trainer's share of each of an epoch's batches; the trainers' shares make up a batch.

        Args:
            size: samples in a whole batch; the samples left over at the end are dropped.
            epoch: each has an order of its own.
            rank: whose share.
            num_trainers: how many shares a batch is cut into.
        """
        if size % num_trainers:
            raise ValueError(f"A batch of {size} cannot be shared evenly by {num_trainers}.")
        order = torch.randperm(len(self._train), generator=seeded(SEED + 1 + epoch))
        for whole in order.split(size):
            if len(whole) == size:
                yield self._batch(self._train[whole.chunk(num_trainers)[rank]])

    def test_share(self, rank: int, num_trainers: int) -> Batch:
        """One trainer's share of the test samples."""
        return self._batch(self._test[rank::num_trainers])

    def _batch(self, ratings: Tensor) -> Batch:
        users, movies, stars = ratings.unbind(1)
        users, movies = users - 1, movies - 1  # the files count from 1
        has_genre = self._has_genre[movies]
        lengths = has_genre.sum(1)
        genres = has_genre.nonzero()[:, 1]
        return Batch(
            users=users,
            movies=movies,
            genres=genres,
            genre_offsets=lengths.cumsum(0) - lengths,
            ages=self._ages[users],
            labels=(stars >= LIKED).float(),
        )


def auc(scores: Tensor, labels: Tensor) -> float:
    """How often a liked sample scores above one that is not; a tie counts half. Both (B,)."""
    _, place = torch.unique(scores, return_inverse=True)  # equal scores share a place
    liked = torch.bincount(place, labels.double())
    others = torch.bincount(place, 1 - labels.double())
    others_below = others.cumsum(0) - others
    wins = liked @ (others_below + others / 2)
    return float(wins / (liked.sum() * others.sum()))


def rows_of(path: Path, name: str) -> list[list[str]]:
    file = path / name
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is missing. Give the directory of MovieLens-100K, which holds "
            f"{', '.join(FILES)}. Its licence forbids passing it on, so hybridpar does not bring "
            "it along: download it from https://grouplens.org/datasets/movielens/100k/."
        )
    separator = "\t" if name == "u.data" else "|"
    return [line.split(separator) for line in file.read_text("latin-1").splitlines()]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
