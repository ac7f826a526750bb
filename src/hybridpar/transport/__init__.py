"""Calls between processes: the one package that knows how a message crosses.

A call is a method's name and arguments, answered by a value or an error; `frames` puts both on a
socket. A `Listener` answers each peer on a thread of its own; a `Peer` is the calling side of one
connection. Nothing of a caller is unpickled before it has shown the job's token. (On why these are
sockets, not torch RPC: docs/architecture.md.)
"""

from hybridpar.transport.listener import Handler, Listener
from hybridpar.transport.peer import Peer, Reply

__all__ = ["Handler", "Listener", "Peer", "Reply"]
