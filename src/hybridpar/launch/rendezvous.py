"""How the processes of a job find each other: the master's store holds everyone's address."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from typing import Any

from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]

from hybridpar.errors import PeerLostError, WaitTimeoutError
from hybridpar.launch.assignment import Assignment
from hybridpar.launch.roles import process_name
from hybridpar.transport import Listener, Peer

DIED = "died without a goodbye"
FINISHED = (
    "has finished its train function, while others still need it: all must step equally often"
)


def open_store(assignment: Assignment, store_socket: socket.socket | None) -> Store:
    """The job's key-value store: the master serves it on the socket that the launcher bound."""
    try:
        return TCPStore(
            assignment.host,
            assignment.store_port,
            is_master=store_socket is not None,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=assignment.timeout_s),
            master_listen_fd=None if store_socket is None else store_socket.detach(),
        )
    except DistError as error:
        raise PeerLostError(
            f"{assignment.name} cannot reach the master's store: {error}"
        ) from error


def listen(
    assignment: Assignment,
    store: Store,
    handler: Callable[[str, str, tuple[Any, ...]], object],
    lose: Callable[[str, str], None],
) -> Listener:
    """Serve calls, and tell the others where."""
    listener = Listener(
        assignment.name,
        assignment.host,
        assignment.token,
        handler,
        on_lost=lambda peer: lose(peer, DIED),
        on_leave=lambda peer: lose(peer, FINISHED),
    )
    host, port = listener.address
    store.set(f"address/{assignment.name}", f"{host}:{port}")
    return listener


def connect_servers(assignment: Assignment, store: Store) -> list[Peer]:
    """New connections to all servers, in rank order."""
    names = [process_name("ps", rank) for rank in range(assignment.roles.servers)]
    return [connect(assignment, store, name) for name in names]


def connect(assignment: Assignment, store: Store, name: str) -> Peer:
    """A new connection to one process.

    Raises:
        WaitTimeoutError: if it has not said where it listens in time.
        PeerLostError: if it cannot be reached.
    """
    try:
        host, _, port = store.get(f"address/{name}").decode().rpartition(":")
    except DistError as error:
        raise WaitTimeoutError(
            f"{name} did not start to listen within {assignment.timeout_s:g} s; "
            f"{assignment.name} waited for it."
        ) from error
    return Peer(
        name,
        (host, int(port)),
        me=assignment.name,
        token=assignment.token,
        # Longer than the other side waits for whoever is missing, whom it can name.
        timeout_s=assignment.timeout_s + 10,
    )
