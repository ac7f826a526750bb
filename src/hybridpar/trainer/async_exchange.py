"""`AsyncExchange`: updates are applied on arrival; lookups run ahead of them."""

from __future__ import annotations

from collections import deque

from hybridpar.messages import Pooled, Turn, TurnAnswer
from hybridpar.rollcall import Ranks
from hybridpar.trainer.exchange import Exchange, Gradients, Round
from hybridpar.trainer.routing import RoutedBatch
from hybridpar.trainer.tables import PUSHES_UNDER_WAY, RemoteTables
from hybridpar.transport import Reply


class AsyncExchange(Exchange):
    """Each trainer's gradients change the tables as soon as they arrive.

    While a batch is computed the rows of the next are already on their way, so they lack the
    updates that the batch under way will make: they are *stale*. Under a bound of k steps a server
    holds a lookup back until its rows lack no more than k steps of any trainer; with k = 0 nothing
    is fetched ahead. The dense half stays in step (DDP), so trainers that have run out of data are
    found by calling the roll at the master, which also happens meanwhile.

    Source of the split into asynchronous sparse and synchronous dense updates: Lian et al.,
    "Persia", KDD 2022.
    """

    def __init__(self, tables: RemoteTables) -> None:
        super().__init__(tables)
        bound = tables.request.staleness
        self._ahead = bound is None or bound > 0
        self._following: RoutedBatch | None = None
        self._fetched: dict[int, Reply] | None = None
        self._roll: Reply | None = None
        self._pushes: deque[Reply] = deque()
        self._done = 0  # this trainer's updates since all trainers' counts began

    def open(self, batch: RoutedBatch | None) -> Round:  # noqa: D102
        self._tables.ctx.step = self._tables.ctx.step or 0
        self._epoch += 1
        self._step = 0
        self._begin_counts(f"the beginning of epoch {self._epoch}")
        self._following = batch
        self._roll = self._call_roll(more=batch is not None)
        return self._next_round()

    def announce(self, following: RoutedBatch | None) -> None:  # noqa: D102
        self._following = following
        self._roll = self._call_roll(more=following is not None)
        if following is not None and self._ahead:
            self._fetched = self._fetch(following, self._done + 1)

    def complete(self) -> Round:  # noqa: D102
        self._count_step()
        return self._next_round()

    def push(self, gradients: Gradients) -> None:  # noqa: D102
        self.send(gradients)
        self._count_step()

    def lookup(self, batch: RoutedBatch) -> list[Pooled]:  # noqa: D102
        self._tables.ctx.step = self._tables.ctx.step or 0
        pooled = self._tables.wait(batch, self._fetch(batch, self._done))
        self._note(batch, pooled)
        return pooled

    def settle(self) -> None:  # noqa: D102
        while self._pushes:
            self._pushes.popleft().wait()

    def close(self) -> Ranks:  # noqa: D102
        return self._begin_counts(f"the end of epoch {self._epoch}")

    def _begin_counts(self, where: str) -> Ranks:
        """Wait until all trainers are here; from then on their updates count from 0.

        Returns:
            The ranks of the last round.
        """
        self.settle()
        for server in self._tables.servers.values():
            server.call("leave", self._tables.model_id, self._tables.ctx.rank)
        reply = self._tables.master.send(
            "gather", self._tables.model_id, self._tables.ctx.rank, where
        )
        stayed: Ranks = reply.wait(patiently=True)
        self._active = self._everyone
        self._done = 0
        return stayed

    def _fetch(self, batch: RoutedBatch, step: int) -> dict[int, Reply]:
        self._remembered.append(batch.number)
        return self._tables.send_lookups("lookup_for", batch, step)

    def send(self, gradients: Gradients) -> None:  # noqa: D102
        model_id, rank = self._tables.model_id, self._tables.ctx.rank
        for server, update in self.updates(gradients, self._active).items():
            peer, count = self._tables.servers[server], len(self._active)
            self._pushes.append(
                peer.send("push", model_id, rank, update, count, answers_little=True)
            )
        while len(self._pushes) > PUSHES_UNDER_WAY * len(self._tables.servers):
            self._pushes.popleft().wait()
        self._done += 1

    def _call_roll(self, *, more: bool) -> Reply:
        turn = Turn(self._tables.ctx.rank, self._epoch, self._step, more)
        self._step += 1
        return self._tables.master.send("take_turn", self._tables.model_id, turn)

    def _next_round(self) -> Round:
        """The rows of the batch that comes next, fetched by now or fetched here."""
        following, fetched = self._following, self._fetched
        self._following = self._fetched = None
        pooled: list[Pooled] = []
        if following is not None:
            fetched = self._fetch(following, self._done) if fetched is None else fetched
            pooled = self._tables.wait(following, fetched)
            self._note(following, pooled)
        assert self._roll is not None
        answer: TurnAnswer = self._roll.wait()
        self._active = answer.active
        return Round(pooled, answer.active)
