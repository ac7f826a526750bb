"""`Traffic`: counts what one trainer and each server exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hybridpar.callbacks.servers import ServerTraffic
from hybridpar.messages import Pooled, Update
from hybridpar.trainer.routing import RoutedBatch
from hybridpar.trainer.tables import RemoteTables


class Traffic:
    """Counts from when it is made, for as long as an exchange has it.

    Args:
        tables: the model's tables; what crosses the sockets is counted at their connections.
    """

    def __init__(self, tables: RemoteTables) -> None:
        self._peers = tables.servers
        self._counts: dict[int, Counter[str]] = {rank: Counter() for rank in self._peers}
        self._before = {
            rank: (peer.meter.sent, peer.meter.received, peer.meter.waited_s)
            for rank, peer in self._peers.items()
        }

    def looked_up(self, batch: RoutedBatch, pooled: Sequence[Pooled]) -> None:
        """A batch's rows have come."""
        for rank, counts in self._counts.items():
            for lookup, rows in zip(batch.lookups[rank].slabs, pooled[rank].slabs, strict=True):
                if lookup is not None and rows is not None:
                    counts["rows"] += lookup.indices.numel()
                    counts["id_bytes"] += lookup.indices.nbytes
                    counts["id_bytes"] += 0 if lookup.offsets is None else lookup.offsets.nbytes
                    counts["row_bytes"] += rows.nbytes
            counts["row_bytes"] += sum(output.nbytes for output in pooled[rank].modules)

    def pushed(self, updates: Mapping[int, Update]) -> None:
        """Gradients go."""
        for rank, update in updates.items():
            num_bytes = sum(push.grads.nbytes for pushes in update.slabs for push in pushes)
            num_bytes += sum(push.grad.nbytes for push in update.modules)
            self._counts[rank]["gradient_bytes"] += num_bytes

    def waited_s(self) -> float:
        """Seconds in which this trainer has waited for servers, in its life."""
        return sum(peer.meter.waited_s for peer in self._peers.values())

    def so_far(self) -> tuple[ServerTraffic, ...]:
        """All that has been counted, by server."""
        found = []
        for rank, peer in self._peers.items():
            sent, received, waited_s = self._before[rank]
            found.append(
                ServerTraffic(
                    server=peer.name,
                    sent_bytes=peer.meter.sent - sent,
                    received_bytes=peer.meter.received - received,
                    waited_s=peer.meter.waited_s - waited_s,
                    **self._counts[rank],
                )
            )
        return tuple(found)
