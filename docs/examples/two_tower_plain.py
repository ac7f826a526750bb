"""Retrieve the next movie with two towers, in plain torch.

    python two_tower_plain.py ml-100k --trainers 2

One process takes the trainers' shares of a batch one after another, and averages. two_tower.py has
the tables on parameter servers and trains on several processes. Both print the same figures.

Shapes: B samples, E values a row.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from movielens_data import NUM_GENRES
from movielens_history import Histories, described
from torch import nn

DIM = 32
BATCH_SIZE = 768  # of all processes together
TEMPERATURE = 0.1
INIT = partial(nn.init.normal_, std=0.1)


class Towers(nn.Module):
    """The dense half: scores of users for movies, the cosines of their vectors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.Sequential(nn.Linear(DIM + 1, 64), nn.GELU(), nn.Linear(64, DIM))
        self.movie = nn.Sequential(nn.Linear(2 * DIM, 64), nn.GELU(), nn.Linear(64, DIM))

    def forward(self, embeddings, batch):
        users = self.user(torch.cat([embeddings["user"], batch.ages], dim=1))
        movies = self.movie(torch.cat([embeddings["movie"], embeddings["genre"]], dim=1))
        return F.normalize(users, dim=1) @ F.normalize(movies, dim=1).T


def loss(scores, batch, correct=True):
    """In-batch softmax: tell a user's movie from the movies of the other users of this share.

    Popular movies are negatives more often. With ``correct`` the log of how often is taken from
    each score: Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
    Recommendations", RecSys 2019.
    """
    logits = scores / TEMPERATURE
    if correct:
        logits = logits - batch.log_q
    same = batch.movies.unsqueeze(1) == batch.movies
    same.fill_diagonal_(False)  # another sample of the same movie is no negative
    own = torch.arange(len(logits), device=logits.device)
    return F.cross_entropy(logits.masked_fill(same, -torch.inf), own)


class TwoTower(nn.Module):
    def __init__(self, data):
        super().__init__()
        self.user = nn.Embedding(data.num_users + 1, DIM)
        self.movie = nn.Embedding(data.num_movies + 1, DIM)
        self.genre = nn.EmbeddingBag(NUM_GENRES, DIM, mode="mean")
        for seed, table in enumerate((self.user, self.movie, self.genre), start=1):
            torch.manual_seed(seed)
            INIT(table.weight)
        self.towers = Towers()

    def forward(self, batch):
        embeddings = {
            "user": self.user(batch.users),
            "movie": self.movie(batch.movies),
            "genre": self.genre(batch.genres, batch.genre_offsets),
        }
        return self.towers(embeddings, batch)


def train(data, args):
    model = TwoTower(data)
    tables = [table.weight for table in (model.user, model.movie, model.genre)]
    dense_optimizer = torch.optim.Adam(model.towers.parameters(), lr=1e-3)
    sparse_optimizer = torch.optim.Adagrad(tables, lr=0.1)
    results = []
    for epoch in range(args.epochs):
        ranks = range(args.trainers)
        shares = [data.pairs(BATCH_SIZE, epoch, rank, args.trainers) for rank in ranks]
        losses = []
        for batches in zip(*shares, strict=True):
            model.zero_grad()
            parts = [loss(model(batch), batch, args.logq) for batch in batches]
            mean = torch.stack(parts).mean()
            mean.backward()
            dense_optimizer.step()
            sparse_optimizer.step()
            losses.append(mean.item())
        with torch.no_grad():
            ranking = data.ranking(model(data.everything()))
        results.append({"train loss": sum(losses) / len(losses), **ranking})
        print(described(f"epoch {epoch + 1}", results[-1]), flush=True)
    return results


def parser(description):
    options = argparse.ArgumentParser(description=description)
    add = options.add_argument
    add("path", help="directory of MovieLens-100K")
    add("--epochs", type=int, default=10)
    add("--trainers", type=int, default=2, help="negatives come from a trainer's share of a batch")
    add(
        "--logq", action=argparse.BooleanOptionalAction, default=True, help="correct for popularity"
    )
    return options


def main():
    args = parser(__doc__.splitlines()[0]).parse_args()
    data = Histories(args.path)
    print(described("by popularity", data.ranking(data.popularity.double())))
    return train(data, args)


if __name__ == "__main__":
    main()
