"""`HybridModel`: a module whose big tables are on the servers and whose rest is its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from hybridpar.errors import HybridParError, SpecError
from hybridpar.features import FeatureValue
from hybridpar.messages import Pooled
from hybridpar.optim import SparseOptimizerSettings
from hybridpar.specs import RemoteEmbeddingSpec, specs_by_feature
from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.routing import RoutedBatch
from hybridpar.trainer.sparse_optimizer import SparseOptimizer
from hybridpar.trainer.tables import RemoteTables

Batch = TypeVar("Batch")


class HybridModel(nn.Module, ABC, Generic[Batch]):
    """Subclass it: name the tables, say which ids a batch needs, and compute with their rows.

    Plain submodules and parameters are the dense half, replicated on every trainer. The tables
    that the specs name are the sparse half; they are no parameters of the module, and live on the
    parameter servers from :meth:`connect` on (which :class:`~hybridpar.TrainerLoop` calls).

    Args:
        *specs: one for each table.

    Raises:
        SpecError: if two specs have one name, or two tables claim one feature.

    Example:
        >>> class Recommender(HybridModel):
        ...     def __init__(self):
        ...         super().__init__(
        ...             RemoteEmbeddingSpec(
        ...                 "item", num_embeddings=1000, embedding_dim=16, mode="sum"
        ...             )
        ...         )
        ...         self.top = torch.nn.Linear(16, 8)
        ...
        ...     def sparse_inputs(self, batch):
        ...         return {"item": (batch.items, batch.item_offsets)}
        ...
        ...     def forward(self, embeddings, batch):
        ...         return self.top(embeddings["item"])
    """

    def __init__(self, *specs: RemoteEmbeddingSpec) -> None:
        super().__init__()
        if not specs:
            raise SpecError(f"{type(self).__name__} names no table. Give it a RemoteEmbeddingSpec.")
        specs_by_feature(specs)
        self.specs = specs
        self._tables: RemoteTables | None = None
        self._sparse_optimizer: SparseOptimizer | None = None

    @abstractmethod
    def sparse_inputs(self, batch: Batch) -> Mapping[str, FeatureValue]:
        """The ids that a batch needs, by feature.

        Returns:
            For each feature ``ids`` of shape (B,), one id a sample; ``ids`` of shape (B, L); or
            ``(ids (N,), offsets (B,))`` as :class:`torch.nn.EmbeddingBag` takes it. int32 or int64.
        """

    @override
    @abstractmethod
    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor:
        """The dense half: from the features' embeddings, each (B, D) float32, to the output."""

    def connect(
        self, ctx: TrainerContext, sparse_optimizer: SparseOptimizerSettings
    ) -> SparseOptimizer:
        """Put the tables on the servers, and get the optimizer that updates them there.

        Collective: every trainer calls it, with equal specs and settings.

        Args:
            ctx: what the train function got.
            sparse_optimizer: settings from :mod:`hybridpar.optim`.

        Raises:
            SpecError: if the settings are no sparse optimizer's, or the trainers' specs differ.
        """
        if not isinstance(sparse_optimizer, SparseOptimizerSettings):
            raise SpecError(
                f"sparse_optimizer is {sparse_optimizer!r}. Tables are updated on the servers: "
                "give settings such as hybridpar.optim.Adagrad(lr=0.05)."
            )
        self._tables = RemoteTables(self.specs, ctx, sparse_optimizer)
        self._sparse_optimizer = SparseOptimizer(self._tables)
        return self._sparse_optimizer

    def lookup(self, batch: Batch) -> dict[str, Tensor]:
        """The embeddings of a batch, by feature: (B, D) float32 on the trainer's device.

        With gradients enabled and the model in training mode, ``backward`` through them leaves
        gradients for the next ``sparse_optimizer.step()``.

        Raises:
            InputError: if an id or an offset is out of range, or a feature is unknown.
        """
        routed = self.connected.route(self.sparse_inputs(batch))
        return self.embed(routed, self.connected.lookup(routed))

    def rows(self, name: str, ids: Tensor | None = None) -> Tensor:
        """Rows of a table, after every push so far.

        Args:
            name: the table.
            ids: (U,) int64 logical rows; None means all of them, in order.

        Returns:
            (U, embedding_dim) float32 on the CPU.

        Raises:
            InputError: if an id is out of range.
            SpecError: if no table has the name.
        """
        return self.connected.read(name, "weight", ids)

    @property
    def connected(self) -> RemoteTables:
        """The tables on the servers.

        Raises:
            HybridParError: if :meth:`connect` was not called.
        """
        if self._tables is None:
            raise HybridParError(
                f"{type(self).__name__} has no tables yet. Build a TrainerLoop with it, or call "
                "model.connect(ctx, sparse_optimizer) first."
            )
        return self._tables

    def embed(self, routed: RoutedBatch, pooled: list[Pooled]) -> dict[str, Tensor]:
        """Turn the servers' answers to a routed batch into embeddings: the end of a lookup."""
        optimizer = self._sparse_optimizer
        train = self.training and torch.is_grad_enabled() and optimizer is not None
        watch = optimizer.watch if train and optimizer is not None else None
        return routed.embeddings(pooled, self.connected.device, watch)
