"""Train DLRM in one plain torch process.

    python dlrm_plain.py                                # random data
    python dlrm_plain.py --raw-data-file train.txt

dlrm.py has the tables on parameter servers and trains on several processes. Both print the same
figures.
"""

import itertools

import torch
import torch.nn.functional as F
from dlrm_model import DenseHalf, loss, table_bound
from dlrm_options import described, parsed, parser
from movielens_data import auc
from torch import nn


class DLRM(nn.Module):
    def __init__(self, args):
        super().__init__()
        sizes = args.data.table_sizes
        self.tables = nn.ModuleList(self.table(n, size, args) for n, size in enumerate(sizes))
        self.dense = DenseHalf(args, len(sizes))

    @staticmethod
    def table(number, num_embeddings, args):
        table = nn.EmbeddingBag(num_embeddings, args.arch_sparse_feature_size, mode="sum")
        bound = table_bound(num_embeddings)
        torch.manual_seed(number)
        nn.init.uniform_(table.weight, -bound, bound)
        return table

    def forward(self, batch):
        one_each = torch.arange(len(batch.labels))
        offsets = batch.offsets or [one_each] * len(self.tables)
        bags = zip(self.tables, batch.ids, offsets, strict=True)
        return self.dense(batch.dense, [table(ids, starts) for table, ids, starts in bags])


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one sum a row: Gupta et al., 2020; as hybridpar.optim.RowWiseAdagrad."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                sums = state.setdefault("sum", torch.zeros(len(param), 1))
                sums += param.grad.square().mean(1, keepdim=True)
                param -= group["lr"] * param.grad / (sums.sqrt() + 1e-10)


OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
}


def train(args):
    model = DLRM(args)
    optimizers = [
        OPTIMIZERS[args.dense_optimizer](model.dense.parameters(), lr=args.learning_rate),
        OPTIMIZERS[args.sparse_optimizer](model.tables.parameters(), lr=args.sparse_learning_rate),
    ]
    results = []
    for epoch in range(1, args.nepochs + 1):
        losses = []
        for batch in itertools.islice(
            args.data.train(args.mini_batch_size), args.num_batches or None
        ):
            model.zero_grad()
            batch_loss = loss(args, model(batch), batch.labels)
            batch_loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(batch_loss.item())
        results.append({"train loss": sum(losses) / len(losses), **evaluate(model, args)})
        print(described(epoch, results[-1]), flush=True)
    return results


@torch.no_grad()
def evaluate(model, args):
    batches = list(args.data.test(args.test_mini_batch_size))
    logits = torch.cat([model(batch) for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    return {
        "AUC": auc(logits, labels),
        "accuracy": float(((logits > 0) == (labels > 0)).double().mean()),
        "log loss": float(F.binary_cross_entropy_with_logits(logits, labels)),
    }


def main():
    return train(parsed(parser(__doc__.splitlines()[0])))


if __name__ == "__main__":
    main()
