"""Predict the next movie by attention over a user's history, the table on parameter servers.

    python sequence.py ml-100k --trainers 2 --servers 1

sequence_plain.py is plain torch in one process, and has the dense half and the loss of both. Both
print the same figures.
"""

import torch
from movielens_history import PADDING, Histories, described
from sequence_plain import (
    BATCH_SIZE,
    DIM,
    INIT,
    LEARNING_RATE,
    LENGTH,
    NUM_NEGATIVES,
    SPARSE_LEARNING_RATE,
    Attention,
    loss,
    parser,
)
from trainer_mean import mean_over_trainers

import hybridpar as hp


class Sequences(hp.HybridModel):
    def __init__(self, data):
        super().__init__(
            hp.RemoteEmbeddingSpec(
                "movie",
                num_embeddings=data.num_movies + 1,
                embedding_dim=DIM,
                features=("history", "next", "negatives"),
                padding_idx=PADDING,
                init=INIT,
                seed=1,
            )
        )
        self.dense = Attention()

    def sparse_inputs(self, batch):
        return {"history": batch.history, "next": batch.next, "negatives": batch.negatives}

    def forward(self, embeddings, batch):
        return self.dense(embeddings, batch)


def train(ctx, data, args):
    loop = hp.TrainerLoop(
        Sequences(data),
        ctx,
        loss=loss,
        dense_optimizer=lambda params: torch.optim.Adam(params, lr=LEARNING_RATE),
        sparse_optimizer=hp.optim.Adagrad(lr=SPARSE_LEARNING_RATE),
    )
    results = []
    for epoch in range(args.epochs):
        sizes = LENGTH, NUM_NEGATIVES, BATCH_SIZE, epoch
        result = loop.fit(data.windows(*sizes, ctx.rank, ctx.num_trainers))
        mean = mean_over_trainers(result.epoch_losses[0], ctx.num_trainers)
        if ctx.rank == 0:
            with torch.no_grad():  # a plain module scores every movie
                ranking = data.ranking(loop.model.export()(data.latest(LENGTH))[:, 1:])
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
