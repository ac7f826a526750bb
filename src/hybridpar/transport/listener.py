"""`Listener`: the answering side of a process's connections."""

from __future__ import annotations

import hmac
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hybridpar.errors import RemoteError, describe
from hybridpar.frames import pack, receive_frame, receive_into, send_packed, unpack
from hybridpar.transport.protocol import (
    HELLO,
    KNOWN,
    VERSION,
    WELCOME,
    Failure,
    Goodbye,
    no_delay,
)

Handler = Callable[[str, str, tuple[Any, ...]], object]
"""Called with (peer, method, arguments); what it returns is the answer."""


class Listener:
    """The answering side: accepts peers and answers their calls, a thread each.

    Args:
        name: this process's name, such as ``"ps0"``.
        host: address to bind; the port is free choice of the system's.
        token: the job's secret, 32 bytes; a connection without it is closed.
        handler: answers a call. It may block; only its own peer waits.
        on_lost: called with the name of a peer whose connection ended without a goodbye.
        on_leave: called with the name of a peer that said goodbye.
    """

    def __init__(
        self,
        name: str,
        host: str,
        token: bytes,
        handler: Handler,
        *,
        on_lost: Callable[[str], None] | None = None,
        on_leave: Callable[[str], None] | None = None,
    ) -> None:
        self._name = name
        self._token = token
        self._handler = handler
        self._on_lost = on_lost
        self._on_leave = on_leave
        self._socket = socket.create_server((host, 0), backlog=128)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        threading.Thread(target=self._accept, name=f"{name} listener", daemon=True).start()

    def close(self) -> None:
        """Take no new peers. Those that are connected are still answered."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            peer = self._greet(connection)
            if peer is None:
                return
            try:
                while self._answer_one(connection, peer):
                    pass
            except (OSError, EOFError):
                if self._on_lost is not None:
                    self._on_lost(peer)

    def _greet(self, connection: socket.socket) -> str | None:
        """The caller's name, or None if it is a stranger."""
        connection.settimeout(10.0)
        no_delay(connection)
        try:
            hello = bytearray(HELLO.size)
            receive_into(connection, memoryview(hello))
            version, token, name = HELLO.unpack(hello)
            if version != VERSION or not hmac.compare_digest(token, self._token):
                return None
            connection.sendall(WELCOME)
        except (OSError, EOFError):
            return None
        connection.settimeout(None)  # a peer may be silent between calls; its death is an EOF
        return str(name.rstrip(b"\0").decode())

    def _answer_one(self, connection: socket.socket, peer: str) -> bool:
        frame = receive_frame(connection)
        try:
            call = unpack(*frame)
            if isinstance(call, Goodbye):
                if self._on_leave is not None:
                    self._on_leave(peer)
                return False
            method, args = call
            answer = pack(self._handler(peer, method, args))
        except BaseException as error:  # noqa: BLE001 - sys.exit too is the caller's to see
            answer = pack(self._failure(error))
        send_packed(connection, answer)
        return True

    def _failure(self, error: BaseException) -> Failure:
        kind = type(error).__name__
        if isinstance(error, RemoteError):  # keep the first origin of a failure passed on
            return Failure(kind, error.origin, error.cause, error.remote_traceback)
        cause = str(error) if isinstance(error, KNOWN) else describe(error)
        return Failure(kind, self._name, cause, traceback.format_exc())
