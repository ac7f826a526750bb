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
from hybridpar.kernels import pool_rows
from hybridpar.messages import WEIGHT, Lookups, ModelRequest, Pooled, SlabLookup, SlabPush
from hybridpar.optim import SparseOptimizerSettings
from hybridpar.sharding import Placement, Shard
from hybridpar.shared_memory import Outbox, as_tensor, attach, new_segment
from hybridpar.specs import RemoteEmbeddingSpec
from hybridpar.trainer.context import TrainerContext
from hybridpar.trainer.looked_up import LookedUp
from hybridpar.trainer.observing.stopwatch import ROWS, SERVERS, Stopwatch
from hybridpar.trainer.routing import RoutedBatch, Router
from hybridpar.transport import Peer, Reply

PUSHES_UNDER_WAY = 2  # so many pushes to a server may be unanswered while the next is made
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
        self._servers_of = {name: {rank} for name, rank in self.plan.modules.items()} | {
            name: {shard.server for shard in placement.shards}
            for name, placement in self.plan.placements.items()
        }
        used = set[int]().union(*self._servers_of.values())
        self.servers = {rank: ctx._servers[rank] for rank in sorted(used)}
        for rank, server in self.servers.items():
            held = [name for name in self.specs if rank in self.servers_of(name)]
            server.about = f" (tables {', '.join(held)})"
        self._router = Router(request.specs, placed.plan, ctx.rank)
        self.stopwatch = Stopwatch()
        self._weights: dict[tuple[int, int], Tensor] = {}  # by server and slab: what is read here
        self._outboxes: dict[int, Outbox] = {}
        if ctx._shares_memory:
            self._share_memory()

    @property
    def master(self) -> Peer:
        """The connection to the master."""
        return self.ctx._master

    @property
    def reads_here(self) -> set[int]:
        """The servers on this machine some of whose rows this trainer reads itself."""
        return {server for server, _ in self._weights}

    def server_bytes(self) -> dict[int, int]:
        """For each server's rank, the bytes that it holds of the model."""
        return {rank: s.call("num_bytes", self.model_id) for rank, s in self.servers.items()}

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
        return self.wait(batch, self.send_lookups("lookup", batch))

    def send_lookups(self, method: str, batch: RoutedBatch, *args: object) -> dict[int, Reply]:
        """Send a batch's lookups to the servers; their replies to be, by server."""
        return {
            rank: server.send(method, self.model_id, *args, self.asked(batch, rank))
            for rank, server in self.servers.items()
        }

    def wait(self, batch: RoutedBatch, replies: Mapping[int, Reply]) -> list[Pooled]:
        """Every server's answer to a batch's lookups, in the order of all servers."""
        answers: dict[int, Pooled] = {rank: reply.wait() for rank, reply in replies.items()}
        return self.completed(batch, answers)

    def asked(self, batch: RoutedBatch, server: int) -> Lookups:
        """What a server is asked for a batch: all but what is read here."""
        lookups = batch.lookups[server]
        if not self._weights:
            return lookups
        return lookups._replace(
            slabs=tuple(
                None if (server, slab) in self._weights else lookup
                for slab, lookup in enumerate(lookups.slabs)
            )
        )

    def completed(self, batch: RoutedBatch, answers: Mapping[int, Pooled]) -> list[Pooled]:
        """The servers' answers, with the rows that are read here; in the order of all servers."""
        self.stopwatch.lap(SERVERS)
        pooled = [answers.get(rank, Pooled(())) for rank in range(len(self.plan.slabs))]
        rows = {server: list(pooled[server].slabs) for server, _ in self._weights}
        for (server, slab), weight in self._weights.items():
            lookup = batch.lookups[server].slabs[slab]
            if lookup is not None:
                rows[server][slab] = pool_rows(weight, lookup.indices, lookup.offsets)
        for server, slabs in rows.items():
            pooled[server] = pooled[server]._replace(slabs=tuple(slabs))
        self.stopwatch.lap(ROWS)
        return pooled

    def begin_push(self) -> None:
        """What :meth:`pushes` makes from now on goes with one call a server."""
        for outbox in self._outboxes.values():
            outbox.begin()

    def pushes(self, looked_up: LookedUp, *, remembered: bool) -> list[SlabPush]:
        """The gradient of what was looked up of one slab, as it is sent.

        Args:
            looked_up: what was looked up, with its gradient.
            remembered: whether the server was asked for it, and remembers the ids.
        """
        server, slab = looked_up.server, looked_up.slab
        wire, outbox = self.request.wire_dtype, self._outboxes.get(server)
        if not looked_up.is_whole:  # the loss left some out: the others go each with its own ids
            return [
                SlabPush(piece.lookup(), grad.to(wire))
                for piece, grad in zip(looked_up.pieces, looked_up.gradients(), strict=True)
                if grad is not None
            ]
        lookup = looked_up.batch.lookups[server].slabs[slab]
        assert lookup is not None
        grads = looked_up.joined(outbox, wire if outbox is None else torch.float32)
        if (server, slab) not in self._weights:
            return [SlabPush(looked_up.batch.number if remembered else lookup, grads)]
        if outbox is not None:
            offsets = None if lookup.offsets is None else outbox.put(lookup.offsets)
            lookup = SlabLookup(outbox.put(lookup.indices), offsets)
        return [SlabPush(lookup, grads)]

    def _share_memory(self) -> None:
        """Read here the tables of servers on this machine, and have them read gradients here."""
        probe = new_segment(1)
        if probe is None:
            return
        for rank, server in self.servers.items():
            handles = server.call("share", self.model_id, probe.handle)
            if handles is None:  # on another machine
                continue
            self._outboxes[rank] = Outbox(PUSHES_UNDER_WAY + 1)
            for slab, handle in enumerate(handles):
                memory = None if handle is None else attach(handle)
                if memory is not None:
                    layout = self.plan.slabs[rank][slab]
                    shape = layout.num_rows, layout.kind.num_columns
                    self._weights[rank, slab] = as_tensor(memory, shape, layout.kind.dtype)

    def read(self, table: str, what: str, ids: Tensor | None = None) -> Tensor:
        """Logical rows of a table's weight or optimizer state: (U, its width), on the CPU."""
        spec = self.spec(table)
        if spec.module is not None:
            raise SpecError(f"'{table}' is a module, not a table. Use model.module_state_dict.")
        if ids is None:
            ids = torch.arange(spec.num_embeddings)
        else:
            ids = check("ids", plain_rows(spec), ids, self.ctx.name).bags.indices
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
        spec = self.spec(name)
        if spec.module is None:
            raise SpecError(f"'{name}' is a table, not a module. Use model.rows.")
        server = self.servers[self.plan.modules[name]]
        state: dict[str, Tensor] = server.call("module_state", self.model_id, name)
        return state

    def set_module_state(self, name: str, state: dict[str, Tensor]) -> None:
        """Give a hosted module other parameters and buffers; its optimizer starts anew."""
        self.servers[self.plan.modules[name]].call("set_module_state", self.model_id, name, state)

    def servers_of(self, table: str) -> set[int]:
        """The servers that hold some of a table, or a module."""
        return self._servers_of[table]

    def server_timings(self) -> dict[str, dict[str, float]]:
        """For each server's name, seconds since the model was made, by phase."""
        return {s.name: s.call("timings", self.model_id) for s in self.servers.values()}

    def release(self) -> None:
        """Let the servers free the model, once every trainer has asked for it."""
        for rank, server in self.servers.items():
            outbox = self._outboxes.get(rank)
            name = None if outbox is None else outbox.name
            server.call("release", self.model_id, self.ctx.rank, name)

    def spec(self, name: str) -> RemoteEmbeddingSpec:
        """A table's or module's spec.

        Raises:
            SpecError: if none has the name.
        """
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


def plain_rows(spec: RemoteEmbeddingSpec) -> RemoteEmbeddingSpec:
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
