"""DLRM's dense half, in plain torch, for both twins.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
arXiv:1906.00091.

Shapes: B samples, D numbers a sample, E values a row, F = 1 + number of tables.
"""

import math
from argparse import Namespace
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DenseHalf(nn.Module):
    """Bottom MLP, interaction and top MLP, from numbers and embeddings to logits.

    Args:
        args: the options that begin with ``--arch``.
        num_tables: F - 1.
    """

    def __init__(self, args: Namespace, num_tables: int) -> None:
        super().__init__()
        self.interaction = args.arch_interaction_op
        num_vectors, dim = 1 + num_tables, args.arch_sparse_feature_size
        offset = 0 if args.arch_interaction_itself else -1
        pairs = torch.tril_indices(num_vectors, num_vectors, offset=offset)
        self.register_buffer("pairs", pairs, persistent=False)
        width = num_vectors * dim if self.interaction == "cat" else dim + pairs.shape[1]
        torch.manual_seed(0)
        self.bottom = mlp(args.arch_mlp_bot, last=nn.ReLU())
        self.top = mlp([width, *args.arch_mlp_top], last=nn.Identity())

    def forward(self, dense: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
        """From (B, D) numbers and F - 1 embeddings (B, E) to logits (B,)."""
        x = self.bottom(dense)
        if self.interaction == "cat":
            return self.top(torch.cat([x, *embeddings], dim=1)).squeeze(1)
        vectors = torch.stack([x, *embeddings], dim=1)
        gram = vectors @ vectors.transpose(1, 2)
        products = gram[:, self.pairs[0], self.pairs[1]]  # its lower triangle, row by row
        return self.top(torch.cat([x, products], dim=1)).squeeze(1)


def mlp(widths: Sequence[int], last: nn.Module) -> nn.Sequential:
    """Linear layers with ReLUs between them, and DLRM's initial values."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        linear = nn.Linear(inputs, outputs)
        nn.init.normal_(linear.weight, std=math.sqrt(2 / (inputs + outputs)))
        nn.init.normal_(linear.bias, std=math.sqrt(1 / outputs))
        layers += [linear, nn.ReLU()]
    layers[-1] = last
    return nn.Sequential(*layers)


def table_bound(num_embeddings: int) -> float:
    """A table's initial values are uniform between minus this and this."""
    return math.sqrt(1 / num_embeddings)


def loss(args: Namespace, logits: Tensor, labels: Tensor) -> Tensor:
    """DLRM's --loss-function; "wbce" weighs the labels 0 and 1 by --loss-weights."""
    if args.loss_function == "mse":
        return F.mse_loss(logits.sigmoid(), labels)
    weight = None
    if args.loss_function == "wbce":
        weight = torch.tensor(args.loss_weights, device=labels.device)[labels.long()]
    return F.binary_cross_entropy_with_logits(logits, labels, weight)
