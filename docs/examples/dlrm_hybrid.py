"""DLRM with its tables on parameter servers.

In a module of its own, so that an exported model can be loaded by programs other than dlrm.py.
"""

from functools import partial

from dlrm_model import DenseHalf, table_bound
from torch import nn

import hybridpar as hp


class DLRM(hp.HybridModel):
    def __init__(self, args):
        sizes = args.data.table_sizes
        super().__init__(*(self.table(n, size, args) for n, size in enumerate(sizes)))
        self.dense = DenseHalf(args, len(sizes))

    @staticmethod
    def table(number, num_embeddings, args):
        bound = table_bound(num_embeddings)
        return hp.RemoteEmbeddingSpec(
            f"table{number}",
            num_embeddings=num_embeddings,
            embedding_dim=args.arch_sparse_feature_size,
            mode="sum",
            init=partial(nn.init.uniform_, a=-bound, b=bound),
            seed=number,
        )

    def sparse_inputs(self, batch):
        bags = zip(batch.ids, batch.offsets, strict=True) if batch.offsets else batch.ids
        return {spec.name: bag for spec, bag in zip(self.specs, bags, strict=True)}

    def forward(self, embeddings, batch):
        return self.dense(batch.dense, [embeddings[spec.name] for spec in self.specs])
