"""What both sides of a connection agree on: greeting, farewell, and how an error crosses."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

from hybridpar.errors import PeerLostError, RemoteError, SpecError, WaitTimeoutError

KNOWN = (PeerLostError, SpecError, WaitTimeoutError)  # their messages say it all
HELLO = struct.Struct("!B32s64s")  # protocol version, job token, the caller's name
VERSION = 1
WELCOME = b"\x01"


class Goodbye(NamedTuple):
    """The last call of a peer that leaves on purpose."""


class Failure(NamedTuple):
    """An error as an answer: text only, so that it crosses whatever the exception was."""

    kind: str
    origin: str
    cause: str
    remote_traceback: str

    def raise_here(self) -> None:
        """Raise what stands for it on the calling side."""
        for known in KNOWN:
            if self.kind == known.__name__:
                raise known(self.cause)
        raise RemoteError(self.origin, self.cause, self.remote_traceback)


def no_delay(connection: socket.socket) -> None:
    """Send small messages at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
