"""Predict the next movie by attention over a user's history, in plain torch.

    python sequence_plain.py ml-100k --trainers 2

One process takes the trainers' shares of a batch one after another, and averages. sequence.py has
the table on parameter servers and trains on several processes. Both print the same figures.

Shapes: B histories, L movies of each, K negatives, E values a row.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from movielens_history import PADDING, Histories, described
from torch import nn

DIM = 32
LENGTH = 30
NUM_NEGATIVES = 400  # a trainer and batch
BATCH_SIZE = 60  # of all processes together
LEARNING_RATE = 1e-3
SPARSE_LEARNING_RATE = 0.1
INIT = partial(nn.init.normal_, std=0.1)


class Attention(nn.Module):
    """The dense half: one block of SASRec, and scores of movies by dot product.

    Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018. Each movie looks at
    itself and at those before it. Padding is at the end, so no movie looks at it.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.place = nn.Parameter(torch.empty(LENGTH, DIM).normal_(std=0.1))
        self.before = nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, num_heads=2, batch_first=True)
        self.between = nn.LayerNorm(DIM)
        self.feed = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))
        self.after = nn.LayerNorm(DIM)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        self.register_buffer("later", later, persistent=False)

    def forward(self, embeddings, batch):
        """A row for each of P places with something to predict: (P, 1 + K).

        The score of what came next, then those of the negatives.
        """
        x = embeddings["history"] + self.place  # (B, L, E)
        normed = self.before(x)
        seen, _ = self.attention(normed, normed, normed, attn_mask=self.later, need_weights=False)
        x = x + seen
        x = self.after(x + self.feed(self.between(x)))
        known = batch.next != PADDING
        x = x[known]  # (P, E)
        own = (x * embeddings["next"][known]).sum(1, keepdim=True)
        return torch.cat([own, x @ embeddings["negatives"].T], dim=1)


def loss(scores, batch):
    """Sampled softmax: tell what came next from the negatives that are another movie."""
    nexts = batch.next[batch.next != PADDING]
    same = nexts.unsqueeze(1) == batch.negatives
    same = F.pad(same, (1, 0))  # the first column is the right one
    right = torch.zeros_like(nexts)
    return F.cross_entropy(scores.masked_fill(same, -torch.inf), right)


class Sequences(nn.Module):
    def __init__(self, data):
        super().__init__()
        self.movie = nn.Embedding(data.num_movies + 1, DIM, padding_idx=PADDING)
        torch.manual_seed(1)
        INIT(self.movie.weight)
        with torch.no_grad():
            self.movie.weight[PADDING] = 0
        self.dense = Attention()

    def forward(self, batch):
        features = {"history": batch.history, "next": batch.next, "negatives": batch.negatives}
        return self.dense({name: self.movie(ids) for name, ids in features.items()}, batch)


def train(data, args):
    model = Sequences(data)
    dense_optimizer = torch.optim.Adam(model.dense.parameters(), lr=LEARNING_RATE)
    sparse_optimizer = torch.optim.Adagrad([model.movie.weight], lr=SPARSE_LEARNING_RATE)
    results = []
    for epoch in range(args.epochs):
        sizes = LENGTH, NUM_NEGATIVES, BATCH_SIZE, epoch
        shares = [data.windows(*sizes, rank, args.trainers) for rank in range(args.trainers)]
        losses = []
        for batches in zip(*shares, strict=True):
            model.zero_grad()
            mean = torch.stack([loss(model(batch), batch) for batch in batches]).mean()
            mean.backward()
            dense_optimizer.step()
            sparse_optimizer.step()
            losses.append(mean.item())
        with torch.no_grad():
            ranking = data.ranking(model(data.latest(LENGTH))[:, 1:])
        results.append({"train loss": sum(losses) / len(losses), **ranking})
        print(described(f"epoch {epoch + 1}", results[-1]), flush=True)
    return results


def parser(description):
    options = argparse.ArgumentParser(description=description)
    add = options.add_argument
    add("path", help="directory of MovieLens-100K")
    add("--epochs", type=int, default=10)
    add("--trainers", type=int, default=2, help="each has its share of a batch, and own negatives")
    return options


def main():
    args = parser(__doc__.splitlines()[0]).parse_args()
    data = Histories(args.path)
    print(described("by popularity", data.ranking(data.popularity.double())))
    return train(data, args)


if __name__ == "__main__":
    main()
