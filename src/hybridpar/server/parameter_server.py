"""`ParameterServer`: answers the calls of the trainers, and of the master, on its models."""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridpar.errors import HybridParError
from hybridpar.gather import Gather
from hybridpar.messages import (
    REMEMBERED,
    Lookups,
    Pooled,
    ServedModel,
    SlabPush,
    Turn,
    TurnAnswer,
    Update,
)
from hybridpar.rollcall import Ranks, RollCall
from hybridpar.server.clocks import Clocks
from hybridpar.server.gradients import mean
from hybridpar.server.lanes import Lanes
from hybridpar.server.memory import room
from hybridpar.server.model_shard import ModelShard, Written
from hybridpar.server.timings import Timings
from hybridpar.shared_memory import Handle, OutboxName, attach, forget

_logger = logging.getLogger("hybridpar")


class ParameterServer:
    """The one parameter server of a server process.

    The master calls ``room``, ``create`` and ``stop``; trainers call the public methods of
    `_Service`.

    Args:
        name: the process's name, such as ``"ps0"``.
        timeout_s: longest wait for the last trainer's turn, in seconds.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._services: dict[int, _Service] = {}
        self._stop_asked = False
        self.stopped = threading.Event()

    def handle(self, peer: str, method: str, args: tuple[Any, ...]) -> object:
        """Answer one call of one peer."""
        if method == "create":
            return self._create(*args)
        if method == "room":
            return room()
        if method == "stop":
            self._stop_asked = True
            return None
        model_id, *rest = args
        if method == "release":
            if self._services[model_id].release(*rest):
                del self._services[model_id]
            return None
        call = getattr(self._services[model_id], method, None)
        if method.startswith("_") or call is None:
            raise HybridParError(f"{self._name} has no call '{method}' (asked by {peer}).")
        return call(*rest)

    def lose(self, peer: str, why: str) -> None:
        """A peer's connection has ended: whoever waits for that trainer is told ``why``.

        The server stops when whoever asked for it has left, and so has had its answer.
        """
        if peer == "master" and self._stop_asked:
            self.stopped.set()
        if peer.startswith("trainer"):
            for service in list(self._services.values()):
                service.lose(int(peer.removeprefix("trainer")), f"{peer} {why}")

    def _create(self, served: ServedModel) -> dict[str, list[float]]:
        """Hold a model's part; returns the learning rates of its hosted modules."""
        service = _Service(served, self._name, self._timeout_s)
        self._services[served.model_id] = service
        _logger.info(
            "%s holds model %d: %d rows in %d slabs, and %d modules",
            self._name, served.model_id, sum(layout.num_rows for layout in served.layouts),
            len(served.layouts), len(served.modules),
        )  # fmt: skip
        return service.module_lrs


class _Service:
    """The calls on one model. Each trainer calls on a thread of its own."""

    def __init__(self, served: ServedModel, server: str, timeout_s: float) -> None:
        request, trainers = served.request, served.num_trainers
        self._shard = ModelShard(served)
        self._asynchronous = request.asynchronous
        self._divide = request.divide
        self._rounds = RollCall(server, trainers, timeout_s, self._apply)
        self._clocks = Clocks(server, trainers, request.staleness, timeout_s)
        self._norms: Gather[Update, tuple[float, ...]] = Gather(
            server, lambda updates: self._shard.gradient_squares(updates, len(updates)), timeout_s
        )
        self._remembered: list[deque[Lookups]] = [deque(maxlen=REMEMBERED) for _ in range(trainers)]
        self._lanes = Lanes(trainers)
        self._timings = Timings()
        self._steps = 0
        self._server = server
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._saving: Future[Written] | None = None
        self._holders = set(range(trainers))
        self._release_lock = threading.Lock()
        self.module_lrs = self._shard.module_lrs

    def lookup(self, lookups: Lookups) -> Pooled:
        """Rows as they are now."""
        if self._asynchronous:
            with self._shard.lock:  # max_norm writes rows
                return self._rows(lookups)
        return self._rows(lookups)

    def lookup_for(self, step: int, lookups: Lookups) -> Pooled:
        """Rows for a step, beside updates on arrival: no further behind than the bound."""
        self._remember(lookups)
        behind = self._clocks.wait(step)
        with self._shard.lock:
            return self._rows(lookups, behind)

    def take_turn(self, turn: Turn) -> TurnAnswer:
        """Join a round of sync mode: when all have come, step once; then look up."""
        if turn.update is not None:
            turn = turn._replace(update=self._recalled(turn.rank, turn.update))
            self._timings.one_came()
        if turn.lookups is not None:
            self._remember(turn.lookups)
        joined, active, dense = self._rounds.arrive(turn, opens=turn.update is None)
        # Outside the round, each trainer on its own thread. The rows cannot change meanwhile: the
        # next update needs a turn of this caller, who takes it after this answer.
        return TurnAnswer(joined, active, self._rows(turn.lookups), dense)

    def push(self, rank: int, update: Update, num_active: int) -> None:
        """Apply one trainer's gradients at once, of a step that so many take part in."""
        divisor = num_active if self._divide else 1
        update = self._recalled(rank, update)
        with self._timings.of("update"):
            self._shard.apply({rank: update}, divisor, t=self._clocks.next_step(rank))
        self._clocks.tick(rank, stepped=not update.skip)

    def gradient_squares(self, rank: int, key: str, update: Update, ranks: Ranks) -> object:
        """For each slab that clips by norm, its gradient's squared norm in the coming update."""
        update = self._recalled(rank, update)
        if self._asynchronous:
            return self._shard.gradient_squares({rank: update}, len(ranks) if self._divide else 1)
        return self._norms.arrive(key, rank, update, lambda: ranks)

    def share(self, probe: Handle) -> tuple[Handle | None, ...] | None:
        """For each slab, by what a trainer on this machine reads it; None if it is on another.

        Args:
            probe: memory of the trainer's.
        """
        return None if attach(probe) is None else self._shard.handles

    def close_epoch(self, rank: int, epoch: int) -> Ranks:
        """Wait until every trainer has ended the epoch; the ranks of its last round."""
        return self._rounds.gather(rank, f"the end of epoch {epoch}")

    def leave(self, rank: int) -> None:
        """A trainer's updates on arrival are over, until all trainers' are."""
        self._clocks.leave(rank)

    def read(self, slab: int, what: str, rows: Tensor) -> Tensor:
        """Rows of a slab's weight or state."""
        return self._shard.read(slab, what, rows)

    def set_rows(self, slab: int, rows: Tensor, values: Tensor, reset_state: bool) -> None:
        """Write rows of a slab; see `Slab.set_rows`."""
        self._shard.set_rows(slab, rows, values, reset_state=reset_state)

    def set_module_state(self, name: str, state: dict[str, Tensor]) -> None:
        """Give a hosted module other parameters and buffers; its optimizer starts anew."""
        self._shard.set_module_state(name, state)

    def module_state(self, name: str) -> dict[str, Tensor]:
        """A hosted module's parameters and buffers."""
        return self._shard.module_state(name)

    def begin_save(self, folder: str, touched_only: bool, track: bool) -> None:
        """Hold on to the values of this moment, and begin to write them into a checkpoint.

        Args:
            folder: the checkpoint's own.
            touched_only: whether only the rows matter that changed since the last time.
            track: whether to take note of the rows that change from now on.
        """
        self._shard.hold(touched_only=touched_only, track=track)
        self._steps_held = max(self._steps, self._clocks.steps)
        self._saving = self._saver.submit(self._shard.write, Path(folder), self._server)

    def has_saved(self) -> bool:
        """Whether what was begun is written."""
        return self._saving is None or self._saving.done()

    def finish_save(self) -> tuple[Written, int]:
        """What was written, when it is; and how many steps there had been."""
        assert self._saving is not None
        saving, self._saving = self._saving, None
        return saving.result(), self._steps_held

    def load(self, folder: str, tables: dict[str, str], steps: int | None) -> None:
        """Take tables and modules from a checkpoint.

        Args:
            folder: the checkpoint's own.
            tables: for each table or module here, the one there that it is taken from.
            steps: with the optimizers' state, after how many steps it was; None takes no state.
        """
        self._shard.load(Path(folder), tables, state=steps is not None)
        if steps is not None:
            self._steps = steps
            self._clocks.restore(steps)

    def num_bytes(self) -> int:
        """Bytes that this server holds of the model."""
        return self._shard.num_bytes

    def timings(self) -> dict[str, float]:
        """Seconds since the model was made, by phase."""
        return self._timings.seconds()

    def release(self, rank: int, outbox: OutboxName | None) -> bool:
        """A trainer needs the model no more; whether that was the last."""
        if outbox is not None:
            forget(outbox)
        with self._release_lock:
            self._holders.discard(rank)
            return not self._holders

    def lose(self, rank: int, why: str) -> None:
        """A trainer will not come any more."""
        self._rounds.leave(rank, why)
        self._norms.leave(rank, why)
        self._clocks.leave(rank)

    def _remember(self, lookups: Lookups) -> None:
        """Keep a trainer's lookups, so that their gradients can come without the ids."""
        self._remembered[lookups.rank].append(lookups)

    def _recalled(self, rank: int, update: Update) -> Update:
        """An update with the lookups that its pushes refer to by number."""
        known = {lookups.number: lookups.slabs for lookups in self._remembered[rank]}

        def recalled(push: SlabPush, slab: int) -> SlabPush:
            if not isinstance(push.lookup, int):
                return push
            lookup = known[push.lookup][slab]
            assert lookup is not None
            return SlabPush(lookup, push.grads)

        return update._replace(
            slabs=tuple(
                tuple(recalled(push, slab) for push in pushes)
                for slab, pushes in enumerate(update.slabs)
            )
        )

    def _apply(self, turns: dict[int, Turn]) -> Tensor | None:
        updates = {rank: turn.update for rank, turn in turns.items() if turn.update is not None}
        dense = mean([turn.dense for turn in turns.values() if turn.dense is not None])
        if updates:
            self._steps += not any(update.skip for update in updates.values())
            self._timings.all_came()
            with self._timings.of("update"):
                self._shard.apply(updates, len(updates), t=self._steps, lanes=self._lanes)
        return dense

    def _rows(self, lookups: Lookups | None, behind: int = 0) -> Pooled:
        with self._timings.of("lookup"):
            return self._shard.lookup(lookups, behind)
