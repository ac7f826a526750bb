"""`TrainerContext`: what a train function is told about its process and its job."""

from __future__ import annotations

import torch

from hybridpar.errors import SpecError
from hybridpar.messages import ModelRequest, PlacedModel
from hybridpar.transport import Peer


class TrainerContext:
    """Handed to the train function in every trainer process.

    Attributes:
        rank: this trainer's rank, from 0 to ``num_trainers - 1``.
        num_trainers: how many trainers there are.
        num_servers: how many parameter servers there are.
        device: where this trainer's dense half runs.
        attempt: how often the job has been restarted before, after a failure; see ``max_restarts``
            of :func:`launch`.
        step: the training step under way, None before the first; errors name it.

    Example:
        >>> def train(ctx):
        ...     batches = my_data[ctx.rank :: ctx.num_trainers]
    """

    def __init__(
        self,
        *,
        rank: int,
        num_trainers: int,
        device: torch.device,
        master: Peer,
        servers: list[Peer],
        shares_memory: bool = True,
        attempt: int = 0,
    ) -> None:
        self.rank = rank
        self.num_trainers = num_trainers
        self.num_servers = len(servers)
        self.device = device
        self.step: int | None = None
        self.attempt = attempt
        self._master = master
        self._servers = servers
        self._shares_memory = shares_memory

    @property
    def name(self) -> str:
        """The process's name, such as ``"trainer0"``."""
        return f"trainer{self.rank}"

    def __repr__(self) -> str:
        return f"TrainerContext({self.name} of {self.num_trainers}, {self.device})"

    def _interrupt(self) -> None:
        """End whatever call waits for an answer: it raises PeerLostError."""
        for peer in (self._master, *self._servers):
            peer.interrupt()

    def _place(self, request: ModelRequest) -> PlacedModel:
        """Have the master place a model's tables; every trainer must ask, with equal specs."""
        placed = self._master.call("place", request)
        if isinstance(placed, PlacedModel):
            return placed
        raise SpecError(str(placed))
