"""`HybridModel`: a module whose big tables are on the servers and whose rest is its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from hybridpar.errors import HybridParError, SpecError
from hybridpar.features import FeatureValue
from hybridpar.messages import WEIGHT, ModelRequest, Pooled
from hybridpar.sharding import Plan
from hybridpar.specs import RemoteEmbeddingSpec, specs_by_feature
from hybridpar.trainer.async_exchange import AsyncExchange
from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.exchange import Exchange, SyncExchange
from hybridpar.trainer.handing_over.handover import Handover
from hybridpar.trainer.routing import RoutedBatch
from hybridpar.trainer.settings import (
    Consistency,
    SparseSettings,
    check_consistency,
    check_wire_dtype,
    with_optimizers,
)
from hybridpar.trainer.sparse_optimizer import SparseOptimizer
from hybridpar.trainer.tables import RemoteTables

Batch = TypeVar("Batch")


class HybridModel(nn.Module, Handover, ABC, Generic[Batch]):
    """Subclass it: name the tables, say which ids a batch needs, and compute with their rows.

    Plain submodules and parameters are the dense half, replicated on every trainer. The tables
    that the specs name are the sparse half; they are no parameters of the module, and live on the
    parameter servers from :meth:`connect` on (which :class:`~hybridpar.TrainerLoop` calls).

    Args:
        *specs: one for each table or hosted module; none if all is dense.

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
        specs_by_feature(specs)
        self.specs = specs
        self._tables: RemoteTables | None = None
        self._exchange: Exchange | None = None
        self._sparse_optimizer: SparseOptimizer | None = None

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (nn.Module, Tensor)) and hasattr(HybridModel, name):
            raise SpecError(
                f"{type(self).__name__}.{name} would hide what HybridModel itself calls '{name}'. "
                "Give the submodule another name."
            )
        super().__setattr__(name, value)

    @abstractmethod
    def sparse_inputs(self, batch: Batch) -> Mapping[str, FeatureValue]:
        """The ids that a batch needs, by feature.

        Returns:
            For each feature of a table: ``ids`` of shape (N,), one id a sample; of shape (B, L);
            or a nested tensor of layout :data:`torch.jagged`, (B, ragged); or ``(ids (N,), offsets
            (B,))``; or ``(ids, offsets, per_sample_weights)`` with offsets None for (B, L) ids, as
            :class:`torch.nn.EmbeddingBag` takes them. Ids are int32 or int64. For each feature of
            a hosted module: its forward's argument, or a tuple of them.
        """

    @override
    @abstractmethod
    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Tensor:
        """The dense half: from the features' embeddings to the output.

        Args:
            embeddings: for each feature, float32 on the trainer's device: (B, D) if the table
                pools; else a row for each id: (N, D), (B, L, D) or jagged (B, ragged, D).
            batch: the batch.
        """

    def connect(
        self,
        ctx: TrainerContext,
        sparse_optimizer: SparseSettings = None,
        *,
        consistency: Consistency = "sync",
        staleness: int | None = None,
        scale_gradients: bool = True,
        wire_dtype: torch.dtype = torch.float32,
    ) -> SparseOptimizer:
        """Put the tables on the servers, and get the optimizer that updates them there.

        Collective: every trainer calls it, with equal specs and settings.

        Args:
            ctx: what the train function got.
            sparse_optimizer: settings from :mod:`hybridpar.optim` for every table whose spec has
                none of its own; or a mapping from tables' names to them.
            consistency: ``"sync"``: the servers gather all trainers' gradients of a step and
                update once, exactly as one process would. ``"async"``: gradients are applied as
                they arrive. ``"bounded"``: so too, but no row that is read lacks more than
                ``staleness`` steps of any trainer.
            staleness: for ``"bounded"``, at least 0.
            scale_gradients: in async and bounded mode, divide each trainer's gradient by the
                number of trainers, so that a learning rate means what it means in sync mode. False
                applies them whole, as PyTorch's tutorial does.
            wire_dtype: what rows and gradients are rounded to when they cross a socket:
                :data:`torch.bfloat16` or :data:`torch.float16` halve the bytes. They are summed in
                float32 at both ends. What trainers and servers of one machine share is not sent,
                and so not rounded.

        Raises:
            SpecError: if a setting is wrong, or the trainers' settings differ.
        """
        check_consistency(consistency, staleness)
        check_wire_dtype(wire_dtype)
        request = ModelRequest(
            rank=ctx.rank,
            specs=with_optimizers(self.specs, sparse_optimizer),
            seed=torch.initial_seed(),
            asynchronous=consistency != "sync",
            staleness=staleness,
            divide=scale_gradients,
            wire_dtype=wire_dtype,
        )
        self._tables = tables = RemoteTables(ctx, request)
        # With no table there is no server to gather at: then the master calls the roll.
        synchronous = consistency == "sync" and bool(tables.servers)
        self._exchange = SyncExchange(tables) if synchronous else AsyncExchange(tables)
        self._sparse_optimizer = SparseOptimizer(tables, self._exchange)
        return self._sparse_optimizer

    def lookup(self, batch: Batch) -> dict[str, Tensor]:
        """The embeddings of a batch, by feature, as ``forward`` takes them.

        With gradients enabled, ``backward`` through them leaves gradients for the next
        ``sparse_optimizer.step()``. Look up under :func:`torch.no_grad` to evaluate.

        Raises:
            InputError: if an id or an offset is out of range, or a feature is unknown.
        """
        routed = self._route(batch)
        if self.training and torch.is_grad_enabled():  # a step's lookup: its staleness counts
            return self._embed(routed, self._connected_exchange.lookup(routed), batch)
        return self._embed(routed, self._connected.lookup(routed), batch)

    def rows(self, name: str, ids: Tensor | None = None) -> Tensor:
        """Rows of a table, after every push of this trainer so far; in sync mode, of all trainers.

        Args:
            name: the table.
            ids: (U,) int64 logical rows; None means all of them, in order.

        Returns:
            (U, embedding_dim) float32 on the CPU.

        Raises:
            InputError: if an id is out of range.
            SpecError: if no table has the name.
        """
        self._connected_exchange.settle()
        return self._connected.read(name, WEIGHT, ids)

    def module_state_dict(self, name: str) -> dict[str, Tensor]:
        """A hosted module's ``state_dict``, on the CPU, after every push as for :meth:`rows`.

        Raises:
            SpecError: if no module has the name.
        """
        self._connected_exchange.settle()
        return self._connected.module_state_dict(name)

    def freeze(self, *names: str) -> None:
        """Give these tables and modules no gradient from now on; every trainer does alike.

        Raises:
            SpecError: if no table has the name.
        """
        self._known(names)
        self._connected.frozen.update(names)

    def unfreeze(self, *names: str) -> None:
        """Train these tables and modules again; every trainer does alike.

        Raises:
            SpecError: if no table has the name.
        """
        self._known(names)
        self._connected.frozen.difference_update(names)

    def disconnect(self) -> None:
        """Free the tables on the servers; every trainer does so. They are lost.

        A job that builds one model after another needs it, or the servers hold them all.
        """
        self._connected_exchange.settle()
        self._connected.release()
        self._tables = self._exchange = self._sparse_optimizer = None

    @property
    def plan(self) -> Plan:
        """Where the tables are; ``print(model.plan)`` shows it."""
        return self._connected.plan

    @property
    @override
    def _connected(self) -> RemoteTables:
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

    @property
    @override
    def _connected_exchange(self) -> Exchange:
        """How this model's trainers and servers keep step."""
        assert self._connected is not None
        assert self._exchange is not None
        return self._exchange

    def _route(self, batch: Batch, *, ahead: int = 0) -> RoutedBatch:
        """Check a batch's ids and split them by server: the beginning of a lookup."""
        return self._connected.route(self.sparse_inputs(batch), train=self.training, ahead=ahead)

    def _embed(self, routed: RoutedBatch, pooled: list[Pooled], batch: Batch) -> dict[str, Tensor]:
        """Turn the servers' answers to a routed batch into embeddings: the end of a lookup."""
        if routed.learns_weights:
            routed.refresh(self.sparse_inputs(batch))
        optimizer = self._sparse_optimizer
        watch = optimizer.watch if optimizer is not None and torch.is_grad_enabled() else None
        return routed.embeddings(pooled, self._connected.ctx.device, watch, self._connected.frozen)

    def _known(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in self._connected.specs:
                known = ", ".join(self._connected.specs)
                raise SpecError(f"No table is named '{name}'. The model has {known}.")
