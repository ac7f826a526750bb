"""MovieLens-100K as histories, for the retrieval and the sequence examples and their twins.

A history is the movies that a user rated, in the order of time; the stars do not count. The last
one is for testing: which movie comes next? All others are candidates, save those seen before.

Shapes: U users, M movies, B samples, N genres of all of them together, L movies of a history.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from movielens_data import FILES, NUM_GENRES, rows_of, seeded
from torch import Tensor

PADDING = 0  # the files count movies and users from 1
SEED = 0


class Pairs(NamedTuple):
    """Users and movies; in training user b watched movie b."""

    users: Tensor  # (B,) int64
    ages: Tensor  # (B, 1) float32: the users', in centuries
    movies: Tensor  # (B,) int64
    genres: Tensor  # (N,) int64: bag b holds the genres of movie b
    genre_offsets: Tensor  # (B,) int64: where bags begin
    log_q: Tensor  # (B,) float32: log of the movie's share of the training samples


class Windows(NamedTuple):
    """Pieces of histories, filled up with padding at the end, and movies to tell them from."""

    history: Tensor  # (B, L) int64
    next: Tensor  # (B, L) int64: the movie to predict after each; padding where none is
    negatives: Tensor  # (K,) int64: movies drawn uniformly, for all samples


class Histories:
    """The data set, each user's last movie taken out.

    Args:
        path: the directory with u.data, u.item and u.user, as GroupLens publishes them.

    Raises:
        FileNotFoundError: if one of them is missing.
    """

    def __init__(self, path: str) -> None:
        ratings, movies, users = (rows_of(Path(path), name) for name in FILES)
        self.num_users, self.num_movies = len(users), len(movies)
        no_genre, no_age = [[0] * NUM_GENRES], [[0.0]]  # for row 0, which is no movie and no user
        genres = [[int(x) for x in row[-NUM_GENRES:]] for row in movies]
        self._has_genre = torch.tensor(no_genre + genres)
        self._ages = torch.tensor(no_age + [[int(row[1]) / 100] for row in users])
        table = torch.tensor([[int(x) for x in row] for row in ratings])
        table = table[table[:, 3].argsort(stable=True)]
        table = table[table[:, 0].argsort(stable=True)]
        whole = table[:, 1].split(table[:, 0].bincount(minlength=len(users) + 1)[1:].tolist())
        # Copies: a view would take all of its storage along to the trainers.
        self.histories = [history[:-1].clone() for history in whole]
        self.targets = torch.stack([history[-1] for history in whole])  # (U,)
        lengths = torch.tensor([len(history) for history in self.histories])
        self._users = torch.repeat_interleave(torch.arange(1, len(users) + 1), lengths)
        self._movies = torch.cat(self.histories)
        self.popularity = self._movies.bincount(minlength=len(movies) + 1)  # (1 + M,)

    def pairs(self, size: int, epoch: int, rank: int = 0, num_trainers: int = 1) -> Iterator[Pairs]:
        """One trainer's share of each of an epoch's batches of users and movies.

        Args:
            size: pairs in a whole batch; those left over at the end are dropped.
            epoch: each has an order of its own.
            rank: whose share.
            num_trainers: how many shares a batch is cut into.
        """
        order = torch.randperm(len(self._users), generator=seeded(SEED + epoch))
        for chosen in _shares(order, size, rank, num_trainers):
            yield self._pairs(self._users[chosen], self._movies[chosen])

    def everything(self) -> Pairs:
        """All users and all movies, for the scores of each user for each movie."""
        return self._pairs(torch.arange(1, self.num_users + 1), torch.arange(self.num_movies + 1))

    def windows(
        self, length: int, negatives: int, size: int, epoch: int, rank: int = 0,
        num_trainers: int = 1,
    ) -> Iterator[Windows]:  # fmt: skip
        """One trainer's share of each of an epoch's batches of windows.

        Args:
            length: L; every history is cut into such pieces.
            negatives: K, a trainer.
            size: windows in a whole batch; those left over at the end are dropped.
            epoch: each has an order and negatives of its own.
            rank: whose share.
            num_trainers: how many shares a batch is cut into.
        """
        pieces = [
            history[start : start + length + 1]
            for history in self.histories
            for start in range(0, len(history) - 1, length)
        ]
        rows = torch.stack([_filled(piece, length + 1) for piece in pieces])
        order = torch.randperm(len(rows), generator=seeded(SEED + epoch))
        draw = seeded(SEED + 1000 * epoch + rank)
        for chosen in _shares(order, size, rank, num_trainers):
            drawn = torch.randint(1, self.num_movies + 1, (negatives,), generator=draw)
            yield Windows(rows[chosen, :-1], rows[chosen, 1:], drawn)

    def latest(self, length: int) -> Windows:
        """Every user's latest window and last movie, with all movies and row 0 as negatives."""
        history = torch.stack([_filled(history[-length:], length) for history in self.histories])
        end = (history != PADDING).sum(1, keepdim=True) - 1
        last = torch.zeros_like(history).scatter_(1, end, self.targets.unsqueeze(1))
        return Windows(history, last, torch.arange(self.num_movies + 1))

    def ranking(self, scores: Tensor, k: int = 10) -> dict[str, float]:
        """Recall@k and NDCG@k of the users' last movies among all that they had not seen.

        With one movie to find, Recall@k is the share of users that have it among their first k (so
        it is HR@k, too), and NDCG@k the mean of 1 / log2(1 + its place) of those. A tie counts
        against it.

        Args:
            scores: (U, 1 + M) or (1 + M,), of every movie by its number.
            k: how many movies each user is shown.
        """
        scores = scores.expand(self.num_users, -1).clone()
        scores[:, PADDING] = -torch.inf
        for row, history in zip(scores, self.histories, strict=True):
            row[history] = -torch.inf
        theirs = scores.gather(1, self.targets.unsqueeze(1))
        place = (scores >= theirs).sum(1)
        found = (place <= k).double()
        gain = found / (1 + place).double().log2()
        return {f"Recall@{k}": float(found.mean()), f"NDCG@{k}": float(gain.mean())}

    def _pairs(self, users: Tensor, movies: Tensor) -> Pairs:
        has_genre = self._has_genre[movies]
        lengths = has_genre.sum(1)
        share = self.popularity[movies] / len(self._movies)
        return Pairs(
            users=users,
            ages=self._ages[users],
            movies=movies,
            genres=has_genre.nonzero()[:, 1],
            genre_offsets=lengths.cumsum(0) - lengths,
            log_q=share.log(),
        )


def described(what: str, result: dict[str, float]) -> str:
    """A line of output."""
    return f"{what}: " + ", ".join(f"{name} {value:.5f}" for name, value in result.items())


def _shares(order: Tensor, size: int, rank: int, num_trainers: int) -> Iterator[Tensor]:
    if size % num_trainers:
        raise ValueError(f"A batch of {size} cannot be shared evenly by {num_trainers}.")
    for whole in order.split(size):
        if len(whole) == size:
            yield whole.chunk(num_trainers)[rank]


def _filled(piece: Tensor, length: int) -> Tensor:
    return torch.cat([piece, piece.new_full((length - len(piece),), PADDING)])
