"""Retrieve the next movie with two towers, their tables on parameter servers.

    python two_tower.py ml-100k --trainers 2 --servers 1

two_tower_plain.py is plain torch in one process, and has the dense half and the loss of both. Both
print the same figures.
"""

from functools import partial

import torch
from movielens_data import NUM_GENRES
from movielens_history import Histories, described
from trainer_mean import mean_over_trainers
from two_tower_plain import BATCH_SIZE, DIM, INIT, Towers, loss, parser

import hybridpar as hp


class TwoTower(hp.HybridModel):
    def __init__(self, data):
        spec = partial(hp.RemoteEmbeddingSpec, embedding_dim=DIM, init=INIT)
        super().__init__(
            spec("user", num_embeddings=data.num_users + 1, seed=1),
            spec("movie", num_embeddings=data.num_movies + 1, seed=2),
            spec("genre", num_embeddings=NUM_GENRES, mode="mean", seed=3),
        )
        self.towers = Towers()

    def sparse_inputs(self, batch):
        return {
            "user": batch.users,
            "movie": batch.movies,
            "genre": (batch.genres, batch.genre_offsets),
        }

    def forward(self, embeddings, batch):
        return self.towers(embeddings, batch)


def train(ctx, data, args):
    loop = hp.TrainerLoop(
        TwoTower(data),
        ctx,
        loss=lambda scores, batch: loss(scores, batch, args.logq),
        dense_optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
        sparse_optimizer=hp.optim.Adagrad(lr=0.1),
    )
    results = []
    for epoch in range(args.epochs):
        result = loop.fit(data.pairs(BATCH_SIZE, epoch, ctx.rank, ctx.num_trainers))
        mean = mean_over_trainers(result.epoch_losses[0], ctx.num_trainers)
        if ctx.rank == 0:
            with torch.no_grad():  # a plain module scores every user for every movie
                ranking = data.ranking(loop.model.export()(data.everything()))
            results.append({"train loss": mean, **ranking})
            print(described(f"epoch {epoch + 1}", results[-1]), flush=True)
    return results


def main():
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--servers", type=int, default=1)
    args = options.parse_args()
    data = Histories(args.path)
    print(described("by popularity", data.ranking(data.popularity.double())), flush=True)
    roles = hp.Roles(trainers=args.trainers, servers=args.servers)
    return hp.launch(train, roles=roles, args=(data, args), device="cpu")[0]


if __name__ == "__main__":
    main()
