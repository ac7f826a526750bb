"""What torchrun tells a process that it started, and the way to torchrun's store."""

from __future__ import annotations

import datetime
import os
import socket
from typing import NamedTuple

from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]

from hybridpar.errors import PeerLostError


class Surroundings(NamedTuple):
    """A process's place among those that torchrun started; torchrun's words are in brackets.

    Attributes:
        rank: its rank among all (``RANK``).
        world_size: how many there are (``WORLD_SIZE``).
        node: the number of its torchrun (``GROUP_RANK``).
        num_nodes: how many torchruns there are (``GROUP_WORLD_SIZE``).
        master: where the store is (``MASTER_ADDR``).
        port: and its port (``MASTER_PORT``).
        store_serves: whether torchrun serves the store (``TORCHELASTIC_USE_AGENT_STORE``); else
            rank 0 does.
        host: the name of this host.
        restarts: how often this torchrun has restarted (``TORCHELASTIC_RESTART_COUNT``).
    """

    rank: int
    world_size: int
    node: int
    num_nodes: int
    master: str
    port: int
    store_serves: bool
    host: str
    restarts: int

    @classmethod
    def read(cls) -> Surroundings | None:
        """What the environment says; None if torchrun did not start this process."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        return cls(
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            node=int(os.environ["GROUP_RANK"]),
            num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
            master=os.environ["MASTER_ADDR"],
            port=int(os.environ["MASTER_PORT"]),
            store_serves=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            host=socket.gethostname(),
            restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )

    def open_store(self, limit_s: float) -> Store:
        """The key-value store of torchrun's rendezvous.

        Args:
            limit_s: how long to try.

        Raises:
            PeerLostError: if it cannot be reached.
        """
        try:
            return TCPStore(
                self.master,
                self.port,
                is_master=self.rank == 0 and not self.store_serves,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=limit_s),
                multi_tenant=True,
            )
        except DistError as error:
            raise PeerLostError(
                f"rank {self.rank} (host {self.host}) cannot reach torchrun's store at "
                f"{self.master}:{self.port} within {limit_s:g} s: {error}. Does a firewall stand "
                "between the hosts?"
            ) from error
