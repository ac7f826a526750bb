"""Predict who likes which movie, in one plain torch process.

    python movielens_plain.py ml-100k

movielens_plain.py is plain torch in one process; movielens.py has the tables on parameter servers
and trains on several processes. Both print the same test AUCs, and this shows what it takes:

    diff movielens_plain.py movielens.py
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from movielens_data import NUM_GENRES, MovieLens, auc
from torch import nn

DIM = 16
BATCH_SIZE = 768  # of all processes together
INIT = partial(nn.init.normal_, std=0.1)


class Recommender(nn.Module):
    def __init__(self, data):
        super().__init__()
        self.user = nn.Embedding(data.num_users, DIM)
        self.movie = nn.Embedding(data.num_movies, DIM)
        self.genre = nn.EmbeddingBag(NUM_GENRES, DIM, mode="mean")
        self.tables = [self.user.weight, self.movie.weight, self.genre.weight]
        for seed, table in enumerate(self.tables, start=1):
            torch.manual_seed(seed)
            INIT(table)
        torch.manual_seed(0)
        # Smooth, not a ReLU: at a kink the last bits of a sum could switch a unit on or off.
        self.top = nn.Sequential(nn.Linear(3 * DIM + 1, 32), nn.GELU(), nn.Linear(32, 1))

    def lookup(self, batch):
        return {
            "user": self.user(batch.users),
            "movie": self.movie(batch.movies),
            "genre": self.genre(batch.genres, batch.genre_offsets),
        }

    def forward(self, embeddings, batch):
        inputs = [embeddings["user"], embeddings["movie"], embeddings["genre"], batch.ages]
        return self.top(torch.cat(inputs, dim=1)).squeeze(1)


def loss(logits, batch):
    return F.binary_cross_entropy_with_logits(logits, batch.labels)


@torch.no_grad()
def evaluate(model, data):
    model.eval()
    logits = model(model.lookup(data.test), data.test)
    model.train()
    return auc(logits, data.test.labels)


def train(data, epochs):
    model = Recommender(data)
    dense_optimizer = torch.optim.Adam(model.top.parameters(), lr=1e-3)
    sparse_optimizer = torch.optim.Adagrad(model.tables, lr=0.2)
    aucs = []
    for epoch in range(epochs):
        for batch in data.batches(BATCH_SIZE, epoch):
            dense_optimizer.zero_grad()
            sparse_optimizer.zero_grad()
            loss(model(model.lookup(batch), batch), batch).backward()
            dense_optimizer.step()
            sparse_optimizer.step()
        aucs.append(evaluate(model, data))
        print(f"epoch {epoch + 1}: test AUC {aucs[-1]:.5f}", flush=True)
    return aucs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("path", help="directory of MovieLens-100K")
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    data = MovieLens(args.path)
    return train(data, args.epochs)


if __name__ == "__main__":
    main()
