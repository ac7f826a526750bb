"""`RemoteTables`: one model's tables as its trainer reaches them, through the servers' calls.

Shapes: U rows asked for, D columns.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpar.errors import SpecError
from hybridpar.features import FeatureValue, check
from hybridpar.messages import WEIGHT, ModelRequest, Pooled
from hybridpar.optim import SparseOptimizerSettings
from hybridpar.sharding import Placement, Shard
from hybridpar.specs import RemoteEmbeddingSpec
from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.routing import RoutedBatch, Router
from hybridpar.transport import Peer, Reply

_READ_BYTES = 16 << 20  # rows are read in pieces of about this size


class RemoteTables:
    """Lookups and reads on the tables of one model; how it is trained is an `Exchange`'s matter.

    Building it is collective: every trainer builds it, with equal requests.

    Args:
        ctx: this trainer's context.
        request: the model's tables and consistency.

    Raises:
        SpecError: if the trainers' requests differ, or one cannot be sent to the servers.
    """

    def __init__(self, ctx: TrainerContext, request: ModelRequest) -> None:
        _check_picklable(request.specs)
        placed = ctx._place(request)
        self.specs = {spec.name: spec for spec in request.specs}
        self.request = request
        self.plan = placed.plan
        self.module_lrs = placed.module_lrs
        self.model_id = placed.model_id
        self.ctx = ctx
        self.frozen = {spec.name for spec in request.specs if not spec.trainable}
        used = set(self.plan.modules.values()).union(
            rank for rank, slabs in enumerate(self.plan.slabs) if slabs
        )
        self.servers = {rank: ctx._servers[rank] for rank in sorted(used)}
        self._router = Router(request.specs, placed.plan, ctx.rank)

    @property
    def master(self) -> Peer:
        """The connection to the master."""
        return self.ctx._master

    def route(
        self, inputs: Mapping[str, FeatureValue], *, train: bool, ahead: int = 0
    ) -> RoutedBatch:
        """Check a batch's features and split their ids by server.

        Args:
            inputs: what ``sparse_inputs`` returned.
            train: whether hosted modules run in training mode.
            ahead: how many steps after the one under way the batch is for.
        """
        where = f"{self.ctx.name} (batch of step {(self.ctx.step or 0) + ahead})"
        return self._router.route(inputs, where, train=train, frozen=self.frozen)

    def lookup(self, batch: RoutedBatch) -> list[Pooled]:
        """Ask every server for a batch's rows as they are now."""
        self.ctx.step = self.ctx.step or 0
        return self.wait(self.send_lookups("lookup", batch))

    def send_lookups(self, method: str, batch: RoutedBatch, *args: object) -> dict[int, Reply]:
        """Send a batch's lookups to the servers; their replies to be, by server."""
        return {
            rank: server.send(method, self.model_id, *args, batch.lookups[rank])
            for rank, server in self.servers.items()
        }

    def wait(self, replies: Mapping[int, Reply]) -> list[Pooled]:
        """Every server's answer to a batch's lookups, in the order of all servers."""
        answers: dict[int, Pooled] = {rank: reply.wait() for rank, reply in replies.items()}
        return self.by_server(answers)

    def by_server(self, answers: Mapping[int, Pooled]) -> list[Pooled]:
        """Answers in the order of all servers; one that holds nothing answers nothing."""
        return [answers.get(rank, Pooled(())) for rank in range(len(self.plan.slabs))]

    def read(self, table: str, what: str, ids: Tensor | None = None) -> Tensor:
        """Logical rows of a table's weight or optimizer state: (U, its width), on the CPU."""
        spec = self._spec(table)
        if spec.module is not None:
            raise SpecError(f"'{table}' is a module, not a table. Use model.module_state_dict.")
        if ids is None:
            ids = torch.arange(spec.num_embeddings)
        else:
            ids = check("ids", _plain(spec), ids, self.ctx.name).bags.indices
        settings = spec.optimizer
        assert isinstance(settings, SparseOptimizerSettings)
        states = settings.state_widths(spec.embedding_dim)
        if what != WEIGHT and what not in states:
            known = ", ".join(states) or "none"
            raise SpecError(
                f"Table '{table}' keeps no state '{what}'. {type(settings).__name__} keeps {known}."
            )
        placement = self.plan.placements[table]
        piece = max(1, _READ_BYTES // (spec.embedding_dim * 4))
        parts = [self._read_piece(placement, what, chunk) for chunk in torch.split(ids, piece)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def module_state_dict(self, name: str) -> dict[str, Tensor]:
        """A hosted module's parameters and buffers, on the CPU."""
        spec = self._spec(name)
        if spec.module is None:
            raise SpecError(f"'{name}' is a table, not a module. Use model.rows.")
        server = self.servers[self.plan.modules[name]]
        state: dict[str, Tensor] = server.call("module_state", self.model_id, name)
        return state

    def servers_of(self, table: str) -> set[int]:
        """The servers that hold some of a table, or a module."""
        if table in self.plan.modules:
            return {self.plan.modules[table]}
        return {shard.server for shard in self.plan.placements[table].shards}

    def release(self) -> None:
        """Let the servers free the model, once every trainer has asked for it."""
        for server in self.servers.values():
            server.call("release", self.model_id, self.ctx.rank)

    def _spec(self, name: str) -> RemoteEmbeddingSpec:
        if name not in self.specs:
            raise SpecError(f"No table is named '{name}'. The model has {', '.join(self.specs)}.")
        return self.specs[name]

    def _read_piece(self, placement: Placement, what: str, ids: Tensor) -> Tensor:
        if placement.sharding == "column_wise":
            replies = [self._ask(shard, what, ids) for shard in placement.shards]
            return torch.cat([reply.wait() for reply in replies], dim=1)
        count = placement.num_row_shards
        asked = []
        for index, shard in enumerate(placement.shards):
            positions = (ids.remainder(count) == index).nonzero().squeeze(1)
            rows = ids[positions].div(count, rounding_mode="floor")
            asked.append((positions, self._ask(shard, what, rows)))
        answers = [(positions, reply.wait()) for positions, reply in asked]
        out = torch.empty(ids.numel(), answers[0][1].shape[1])
        for positions, values in answers:
            out[positions] = values
        return out

    def _ask(self, shard: Shard, what: str, rows: Tensor) -> Reply:
        server = self.servers[shard.server]
        return server.send("read", self.model_id, shard.slab, what, rows + shard.first_row)


def _plain(spec: RemoteEmbeddingSpec) -> RemoteEmbeddingSpec:
    """The spec's rows as they are, padding included."""
    return RemoteEmbeddingSpec(
        spec.name, num_embeddings=spec.num_embeddings, embedding_dim=spec.embedding_dim
    )


def _check_picklable(specs: Sequence[RemoteEmbeddingSpec]) -> None:
    for spec in specs:
        values: dict[str, Any] = {"init": spec.init, "module": spec.module, "args": spec.args,
                                  "kwargs": spec.kwargs, "optimizer": spec.optimizer}  # fmt: skip
        for what, value in values.items():
            if isinstance(value, Tensor):
                continue
            try:
                pickle.dumps(value)
            except Exception as error:
                raise SpecError(
                    f"'{spec.name}' has {what}={value!r}, which cannot be sent to a server: "
                    f"{error}. Define it at the top of a module, or use functools.partial."
                ) from error
