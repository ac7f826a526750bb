"""How trainers and servers move through the steps of an epoch: `SyncExchange`.

An exchange is used alike whatever the consistency:

    round = exchange.open(first batch)
    for each batch:
        exchange.announce(next batch)           # before the forward: what may be fetched meanwhile
        ... forward and backward with round's rows ...
        exchange.send(gradients)                # as soon as they are there: DDP may still reduce
        ... step the dense half ...
        round = exchange.complete()             # the next batch's rows
    exchange.close()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hybridpar.messages import REMEMBERED, ModulePush, Pooled, SlabPush, Turn, TurnAnswer, Update
from hybridpar.rollcall import Ranks
from hybridpar.trainer.looked_up import LookedUp
from hybridpar.trainer.observing.traffic import Traffic
from hybridpar.trainer.routing import RoutedBatch
from hybridpar.trainer.tables import RemoteTables
from hybridpar.transport import Reply


@dataclass(frozen=True, slots=True)
class Gradients:
    """What one trainer has for the servers after a backward pass.

    Attributes:
        looked_up: what was looked up and has a gradient, in the order of the lookups.
        lrs: for each table or module, its learning rates: one, or one a group of its optimizer.
        skip: whether nobody's gradients of this step are to be applied.
        dense: those of the dense half, if a server is to average them.
    """

    looked_up: Sequence[LookedUp]
    lrs: Mapping[str, list[float]]
    skip: bool = False
    dense: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """The rows for a trainer's next batch, and who takes part in the step that uses them.

    ``dense`` is the mean of the dense gradients that were sent in the step before.
    """

    pooled: list[Pooled]
    active: Ranks
    dense: Tensor | None = None


class Exchange(ABC):
    """What `TrainerLoop` and `SparseOptimizer` need of the servers in a step."""

    def __init__(self, tables: RemoteTables) -> None:
        self._tables = tables
        self._everyone: Ranks = tuple(range(tables.ctx.num_trainers))
        self._active = self._everyone
        self.traffic: Traffic | None = None  # counts what is exchanged, if anybody wants to know
        self._epoch = 0
        self._step = 0
        self._clips = {  # tables whose gradient is clipped by norm, and to which
            slab.kind.alone: slab.kind.settings.clip_norm or 0.0
            for slabs in tables.plan.slabs
            for slab in slabs
            if slab.kind.alone
        }
        self.staleness: dict[str, Counter[int]] = {}
        self._remembered: deque[int] = deque(maxlen=REMEMBERED)  # as the servers keep them

    @abstractmethod
    def open(self, batch: RoutedBatch | None) -> Round:
        """Begin an epoch together with all trainers; None if this one has no batch."""

    @abstractmethod
    def announce(self, following: RoutedBatch | None) -> None:
        """Say which batch comes after the one under way; None if it is the last."""

    @abstractmethod
    def send(self, gradients: Gradients) -> None:
        """Push the gradients of the batch under way, without waiting for anybody."""

    @abstractmethod
    def complete(self) -> Round:
        """Wait for the rows of the announced batch."""

    @abstractmethod
    def push(self, gradients: Gradients) -> None:
        """Push outside an epoch, for loops by hand; every trainer does so equally often."""

    @abstractmethod
    def close(self) -> Ranks:
        """End the epoch: the ranks of its last round, whose dense half is the newest."""

    def lookup(self, batch: RoutedBatch) -> list[Pooled]:
        """A batch's rows as they are now."""
        pooled = self._tables.lookup(batch)
        self._note(batch, pooled)
        return pooled

    def settle(self) -> None:  # noqa: B027 - nothing is under way unless a subclass says so
        """Wait until every update of this trainer is applied."""

    @property
    def active(self) -> Ranks:
        """The ranks that take part in the step under way."""
        return self._active

    @property
    def clips_norms(self) -> bool:
        """Whether a push waits for all servers first, because a table's norm spans them."""
        return bool(self._clips)

    def updates(self, gradients: Gradients, ranks: Ranks) -> dict[int, Update]:
        """The gradients as one update a server."""
        plan, servers = self._tables.plan, self._tables.servers
        slabs: dict[int, list[list[SlabPush]]] = {
            rank: [[] for _ in plan.slabs[rank]] for rank in servers
        }
        modules: dict[int, list[ModulePush]] = {rank: [] for rank in servers}
        self._tables.begin_push()
        for looked_up in gradients.looked_up:
            server, slab = looked_up.server, looked_up.slab
            if slab >= 0:
                remembered = looked_up.batch.number in self._remembered
                slabs[server][slab] += self._tables.pushes(looked_up, remembered=remembered)
            else:
                (grad,) = looked_up.gradients()
                assert grad is not None
                modules[server].append(ModulePush(*looked_up.module, grad))
        updates = {
            rank: Update(
                slabs=tuple(map(tuple, slabs[rank])),
                modules=tuple(modules[rank]),
                lrs=tuple(gradients.lrs[slab.parts[0].table][0] for slab in plan.slabs[rank]),
                module_lrs={
                    name: gradients.lrs[name] for name, on in plan.modules.items() if on == rank
                },
                skip=gradients.skip,
            )
            for rank in servers
        }
        if self.traffic is not None:
            self.traffic.pushed(updates)
        return self._scaled(updates, ranks)

    def _scaled(self, updates: dict[int, Update], ranks: Ranks) -> dict[int, Update]:
        """With the factors that clip tables' gradients by norm, if any table asks for it.

        A table's norm spans the servers that its rows are on: they tell their parts first.
        """
        if not self._clips:
            return updates
        slabs = self._tables.plan.slabs
        key = f"the norm of step {self._step}"
        key += f" of epoch {self._epoch}" if self._epoch else ""
        replies = {
            rank: self._tables.servers[rank].send(
                "gradient_squares",
                self._tables.model_id,
                self._tables.ctx.rank,
                key,
                update,
                ranks,
            )
            for rank, update in updates.items()
        }
        squares = {rank: reply.wait() for rank, reply in replies.items()}
        totals = dict.fromkeys(self._clips, 0.0)
        for rank, values in squares.items():
            for slab, square in zip(slabs[rank], values, strict=True):
                if slab.kind.alone:
                    totals[slab.kind.alone] += square
        # As torch.nn.utils.clip_grad_norm_ has it, small number included.
        factors = {
            table: min(1.0, clip / (totals[table] ** 0.5 + 1e-6))
            for table, clip in self._clips.items()
        }
        return {
            rank: update._replace(
                scales=tuple(factors.get(slab.kind.alone, 1.0) for slab in slabs[rank])
            )
            for rank, update in updates.items()
        }

    def _note(self, batch: RoutedBatch, pooled: list[Pooled]) -> None:
        """Count how far behind the rows of a batch's tables were."""
        for table in batch.tables:
            behind = max(pooled[server].behind for server in self._tables.servers_of(table))
            self.staleness.setdefault(table, Counter())[behind] += 1
        if self.traffic is not None:
            self.traffic.looked_up(batch, pooled)

    def _count_step(self) -> None:
        self._tables.ctx.step = (self._tables.ctx.step or 0) + 1


class SyncExchange(Exchange):
    """Every step is one: the servers gather all trainers' gradients and step once.

    One round trip a step: the answer to the push brings the rows of the announced batch, read after
    the update, so that looking ahead changes no result.
    """

    def __init__(self, tables: RemoteTables) -> None:
        super().__init__(tables)
        self._following: RoutedBatch | None = None
        self._replies: dict[int, Reply] = {}
        self._even = True

    def open(self, batch: RoutedBatch | None) -> Round:  # noqa: D102
        self._tables.ctx.step = self._tables.ctx.step or 0
        self._epoch += 1
        self._step = 0
        self._following = batch
        self._take_turn(dict.fromkeys(self._tables.servers), more=batch is not None)
        return self._answered()

    def announce(self, following: RoutedBatch | None) -> None:  # noqa: D102
        self._following = following

    def send(self, gradients: Gradients) -> None:  # noqa: D102
        updates = self.updates(gradients, self._active)
        self._take_turn(updates, more=self._following is not None, dense=gradients.dense)

    def complete(self) -> Round:  # noqa: D102
        result = self._answered()
        self._count_step()
        return result

    def push(self, gradients: Gradients) -> None:  # noqa: D102
        self._active = self._everyone
        self._take_turn(self.updates(gradients, self._active), more=True)
        self._answered()
        self._count_step()

    def close(self) -> Ranks:  # noqa: D102
        if self._even:
            return self._everyone
        replies = [
            server.send("close_epoch", self._tables.model_id, self._tables.ctx.rank, self._epoch)
            for server in self._tables.servers.values()
        ]
        stayed: list[Ranks] = [reply.wait(patiently=True) for reply in replies]
        return stayed[0]  # every server saw the same

    def _take_turn(
        self, updates: Mapping[int, Update | None], *, more: bool, dense: Tensor | None = None
    ) -> None:
        for rank, server in self._tables.servers.items():
            turn = Turn(
                rank=self._tables.ctx.rank,
                epoch=self._epoch,
                step=self._step,
                more=more,
                update=updates[rank],
                lookups=None
                if self._following is None
                else self._tables.asked(self._following, rank),
                dense=dense,
            )
            self._replies[rank] = server.send("take_turn", self._tables.model_id, turn)
            dense = None  # the first server averages it
        if self._following is not None:
            self._remembered.append(self._following.number)
        self._step += 1

    def _answered(self) -> Round:
        """Wait for the servers' answers to this trainer's turn."""
        answers: dict[int, TurnAnswer] = {
            rank: reply.wait() for rank, reply in self._replies.items()
        }
        following, self._following, self._replies = self._following, None, {}
        any_answer = next(iter(answers.values()))  # all servers saw the same trainers
        self._active = any_answer.active
        # Everyone was in this round and nobody goes on: so it is with all trainers or with none.
        self._even = any_answer.joined == self._everyone and not any_answer.active
        pooled: list[Pooled] = []
        if following is not None:
            replies = {r: answer.pooled or Pooled(()) for r, answer in answers.items()}
            pooled = self._tables.completed(following, replies)
            self._note(following, pooled)
        means = [answer.dense for answer in answers.values() if answer.dense is not None]
        return Round(pooled, any_answer.active, means[0] if means else None)
