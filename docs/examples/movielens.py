"""Predict who likes which movie, with hybridpar.

    python movielens.py ml-100k --trainers 2 --servers 1

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

import hybridpar as hp

DIM = 16
BATCH_SIZE = 768  # of all processes together
INIT = partial(nn.init.normal_, std=0.1)


class Recommender(hp.HybridModel):
    def __init__(self, data):
        spec = partial(hp.RemoteEmbeddingSpec, embedding_dim=DIM, init=INIT)
        super().__init__(
            spec("user", num_embeddings=data.num_users, seed=1),
            spec("movie", num_embeddings=data.num_movies, seed=2),
            spec("genre", num_embeddings=NUM_GENRES, mode="mean", seed=3),
        )
        torch.manual_seed(0)
        # Smooth, not a ReLU: at a kink the last bits of a sum could switch a unit on or off.
        self.top = nn.Sequential(nn.Linear(3 * DIM + 1, 32), nn.GELU(), nn.Linear(32, 1))

    def sparse_inputs(self, batch):
        return {
            "user": batch.users,
            "movie": batch.movies,
            "genre": (batch.genres, batch.genre_offsets),
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


def train(ctx, data, epochs, consistency, staleness):
    model = Recommender(data)
    loop = hp.TrainerLoop(
        model,
        ctx,
        loss=loss,
        dense_optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
        sparse_optimizer=hp.optim.Adagrad(lr=0.2),
        consistency=consistency,
        staleness=staleness,
    )
    aucs = []
    for epoch in range(epochs):
        loop.fit(data.batches(BATCH_SIZE, epoch, ctx.rank, ctx.num_trainers))
        if ctx.rank == 0:
            aucs.append(evaluate(model, data))
            print(f"epoch {epoch + 1}: test AUC {aucs[-1]:.5f}", flush=True)
    return aucs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("path", help="directory of MovieLens-100K")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--consistency", default="sync", help="sync, async or bounded")
    parser.add_argument("--staleness", type=int, help="for bounded: steps that rows may lack")
    args = parser.parse_args()
    data = MovieLens(args.path)
    roles = hp.Roles(trainers=args.trainers, servers=args.servers)
    settings = (data, args.epochs, args.consistency, args.staleness)
    results = hp.launch(train, roles=roles, args=settings, device="cpu")
    return results[0]


if __name__ == "__main__":
    main()
