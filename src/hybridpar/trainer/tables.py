"""`RemoteTables`: one model's tables as its trainer reaches them, through the servers' calls.

Shapes: U rows asked for, D columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from hybridpar.errors import SpecError
from hybridpar.features import FeatureValue, to_bags
from hybridpar.messages import (
    Lookups,
    ModelRequest,
    Pooled,
    SlabPush,
    Turn,
    TurnAnswer,
    Update,
)
from hybridpar.optim import SparseOptimizerSettings
from hybridpar.sharding import Shard
from hybridpar.specs import RemoteEmbeddingSpec
from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.routing import RoutedBatch, Router

Gradient: TypeAlias = tuple[int, int, SlabPush]
"""(server, slab, what to push there)"""

_READ_BYTES = 16 << 20  # rows are read in pieces of about this size


class RemoteTables:
    """Lookups, turns and reads on the tables of one model.

    Building it is collective: every trainer builds it, with equal specs and settings.

    Args:
        specs: the model's tables.
        ctx: this trainer's context.
        settings: the sparse optimizer.

    Raises:
        SpecError: if the trainers' specs differ.
    """

    def __init__(
        self,
        specs: tuple[RemoteEmbeddingSpec, ...],
        ctx: TrainerContext,
        settings: SparseOptimizerSettings,
    ) -> None:
        placed = ctx._place(ModelRequest(ctx.rank, specs, settings, torch.initial_seed()))
        self.specs = {spec.name: spec for spec in specs}
        self.settings = settings
        self.plan = placed.plan
        self._ctx = ctx
        self._model_id = placed.model_id
        self._servers = {
            rank: ctx._servers[rank] for rank, slabs in enumerate(placed.plan.slabs) if slabs
        }
        self._router = Router(specs, placed.plan)
        self.epoch = 0
        self._round = 0

    @property
    def device(self) -> torch.device:
        """Where embeddings are wanted."""
        return self._ctx.device

    def route(self, inputs: Mapping[str, FeatureValue], ahead: int = 0) -> RoutedBatch:
        """Check a batch's features and split their ids by server.

        Args:
            inputs: what ``sparse_inputs`` returned.
            ahead: how many steps after the one under way the batch is for.
        """
        step = (self._ctx.step or 0) + ahead
        return self._router.route(inputs, f"{self._ctx.name} (batch of step {step})")

    def lookup(self, batch: RoutedBatch) -> list[Pooled]:
        """Ask every server for a batch's rows as they are now."""
        self._ctx.step = self._ctx.step or 0
        replies = {
            rank: server.send("lookup", self._model_id, batch.lookups[rank])
            for rank, server in self._servers.items()
        }
        return self._by_server({rank: reply.wait() for rank, reply in replies.items()})

    def open_epoch(self, batch: RoutedBatch | None) -> tuple[list[Pooled], TurnAnswer]:
        """Begin a pass over the data together with all trainers.

        Args:
            batch: this trainer's first batch, None if it has none.

        Returns:
            The batch's rows for each server, and any one server's answer.
        """
        self._ctx.step = self._ctx.step or 0
        self.epoch += 1
        self._round = 0
        return self._take_turn(dict.fromkeys(self._servers), batch, more=batch is not None)

    def update(
        self,
        gradients: Sequence[Gradient],
        lr: float,
        following: RoutedBatch | None,
        *,
        more: bool,
    ) -> tuple[list[Pooled], TurnAnswer]:
        """Push this trainer's gradients of one step; the servers step once all have pushed.

        Args:
            gradients: what is to be pushed, by server and slab.
            lr: learning rate.
            following: a batch whose rows are wanted after the update.
            more: whether this trainer takes part in the next round of the epoch.

        Returns:
            The rows of ``following`` for each server, and any one server's answer.
        """
        pushes: dict[int, list[list[SlabPush]]] = {
            rank: [[] for _ in self.plan.slabs[rank]] for rank in self._servers
        }
        for server, slab, push in gradients:
            pushes[server][slab].append(push)
        updates: dict[int, Update | None] = {
            rank: Update(tuple(map(tuple, by_slab)), (lr,) * len(by_slab))
            for rank, by_slab in pushes.items()
        }
        answer = self._take_turn(updates, following, more=more)
        self._ctx.step = (self._ctx.step or 0) + 1
        return answer

    def close_epoch(self) -> tuple[int, ...]:
        """Wait until every trainer has ended the epoch; the ranks of its last round."""
        replies = [
            server.send("close_epoch", self._model_id, self._ctx.rank, self.epoch)
            for server in self._servers.values()
        ]
        stayed: list[tuple[int, ...]] = [reply.wait() for reply in replies]
        return stayed[0]  # every server saw the same

    def read(self, table: str, what: str, ids: Tensor | None = None) -> Tensor:
        """Logical rows of a table's weight or optimizer state: (U, its width), on the CPU."""
        spec = self.specs.get(table)
        if spec is None:
            raise SpecError(f"No table is named '{table}'. The model has {', '.join(self.specs)}.")
        if ids is None:
            ids = torch.arange(spec.num_embeddings)
        else:
            ids = to_bags("ids", spec, ids, self._ctx.name).indices
        shards = self.plan.placements[table].shards
        piece = max(1, _READ_BYTES // (spec.embedding_dim * 4))
        parts = [self._read_piece(shards, what, chunk) for chunk in torch.split(ids, piece)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_piece(self, shards: Sequence[Shard], what: str, ids: Tensor) -> Tensor:
        replies = []
        for index, shard in enumerate(shards):
            positions = (ids.remainder(len(shards)) == index).nonzero().squeeze(1)
            rows = ids[positions].div(len(shards), rounding_mode="floor") + shard.first_row
            server = self._servers[shard.server]
            replies.append((positions, server.send("read", self._model_id, shard.slab, what, rows)))
        answers = [(positions, reply.wait()) for positions, reply in replies]
        out = torch.empty(ids.numel(), answers[0][1].shape[1])
        for positions, rows in answers:
            out[positions] = rows
        return out

    def _take_turn(
        self, updates: Mapping[int, Update | None], following: RoutedBatch | None, *, more: bool
    ) -> tuple[list[Pooled], TurnAnswer]:
        replies = {}
        for rank, server in self._servers.items():
            nothing: Lookups = (None,) * len(self.plan.slabs[rank])
            turn = Turn(
                rank=self._ctx.rank,
                epoch=self.epoch,
                step=self._round,
                update=updates[rank],
                lookups=nothing if following is None else following.lookups[rank],
                more=more,
            )
            replies[rank] = server.send("take_turn", self._model_id, turn)
        self._round += 1
        answers: dict[int, TurnAnswer] = {rank: reply.wait() for rank, reply in replies.items()}
        pooled = self._by_server({rank: answer.pooled for rank, answer in answers.items()})
        return pooled, next(iter(answers.values()))

    def _by_server(self, answers: dict[int, Pooled]) -> list[Pooled]:
        """Answers in the order of all servers; one without rows answers nothing."""
        return [answers.get(rank, ()) for rank in range(len(self.plan.slabs))]
