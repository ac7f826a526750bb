"""Calls between processes: the one module that knows how a message crosses.

A call is a method's name and arguments, answered by a value or an error; `frames` puts both on a
socket. A `Listener` answers each peer on a thread of its own; a `Peer` is the calling side of one
connection. Nothing of a caller is unpickled before it has shown the job's token. (On why these are
sockets, not torch RPC: docs/architecture.md.)
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from hybridpar.errors import PeerLostError, RemoteError, SpecError, WaitTimeoutError, describe
from hybridpar.frames import (
    Meter,
    pack,
    receive_frame,
    receive_into,
    send,
    send_packed,
    unpack,
)
from hybridpar.waits import waiting

Handler = Callable[[str, str, tuple[Any, ...]], object]
"""Called with (peer, method, arguments); what it returns is the answer."""

_KNOWN = (PeerLostError, SpecError, WaitTimeoutError)  # their messages say it all
_HELLO = struct.Struct("!B32s64s")  # protocol version, job token, the caller's name
_VERSION = 1
_WELCOME = b"\x01"


class _Goodbye(NamedTuple):
    """The last call of a peer that leaves on purpose."""


class _Failure(NamedTuple):
    """An error as an answer: text only, so that it crosses whatever the exception was."""

    kind: str
    origin: str
    cause: str
    remote_traceback: str

    def raise_here(self) -> None:
        for known in _KNOWN:
            if self.kind == known.__name__:
                raise known(self.cause)
        raise RemoteError(self.origin, self.cause, self.remote_traceback)


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
        _no_delay(connection)
        try:
            hello = bytearray(_HELLO.size)
            receive_into(connection, memoryview(hello))
            version, token, name = _HELLO.unpack(hello)
            if version != _VERSION or not hmac.compare_digest(token, self._token):
                return None
            connection.sendall(_WELCOME)
        except (OSError, EOFError):
            return None
        connection.settimeout(None)  # a peer may be silent between calls; its death is an EOF
        return str(name.rstrip(b"\0").decode())

    def _answer_one(self, connection: socket.socket, peer: str) -> bool:
        frame = receive_frame(connection)
        try:
            call = unpack(*frame)
            if isinstance(call, _Goodbye):
                if self._on_leave is not None:
                    self._on_leave(peer)
                return False
            method, args = call
            answer = pack(self._handler(peer, method, args))
        except BaseException as error:  # noqa: BLE001 - sys.exit too is the caller's to see
            answer = pack(self._failure(error))
        send_packed(connection, answer)
        return True

    def _failure(self, error: BaseException) -> _Failure:
        kind = type(error).__name__
        if isinstance(error, RemoteError):  # keep the first origin of a failure passed on
            return _Failure(kind, error.origin, error.cause, error.remote_traceback)
        cause = str(error) if isinstance(error, _KNOWN) else describe(error)
        return _Failure(kind, self._name, cause, traceback.format_exc())


class Peer:
    """The calling side of one connection.

    Calls are answered in the order in which they were sent. Not thread-safe.

    Args:
        name: the process to call, such as ``"ps0"``.
        address: its host and port.
        me: the caller's own name.
        token: the job's secret.
        timeout_s: longest wait for one answer, in seconds.

    Raises:
        PeerLostError: if the process cannot be reached, or refuses the token.
    """

    def __init__(
        self, name: str, address: tuple[str, int], *, me: str, token: bytes, timeout_s: float
    ) -> None:
        self.name = name
        self.about = ""  # what is asked of it, for whoever looks into a hang
        self.meter = Meter()
        self._timeout_s = timeout_s
        self._pending: deque[Reply] = deque()
        welcome = b""
        try:
            self._socket = socket.create_connection(address, timeout=timeout_s)
            _no_delay(self._socket)
            self._socket.sendall(_HELLO.pack(_VERSION, token, me.encode()))
            welcome = self._socket.recv(1)
        except ConnectionResetError:  # how a refusal shows if not all was read over there
            pass
        except OSError as error:
            raise PeerLostError(f"{me} cannot reach {name} at {address}: {error}") from error
        if welcome != _WELCOME:
            self._socket.close()
            raise PeerLostError(
                f"{name} at {address} refused {me}: it is not a process of this job, or it runs "
                "another version of hybridpar."
            )

    def call(self, method: str, *args: object) -> Any:
        """Call and wait for the answer; see :meth:`send` and :meth:`Reply.wait`."""
        return self.send(method, *args).wait()

    def send(self, method: str, *args: object, answers_little: bool = False) -> Reply:
        """Send a call and return at once with its reply to be.

        An answer that is under way is received first, unless it is known to be little: if both
        sides sent much at once, and neither received, both would wait for ever.

        Args:
            method: what to call.
            *args: what with.
            answers_little: whether the answer is sure to fit in the connection's own buffers.

        Raises:
            PeerLostError: if the connection is gone.
        """
        for earlier in [reply for reply in self._pending if not reply.little]:
            self._receive_until(earlier)
        reply = Reply(self, method, little=answers_little)
        self.meter.sent += self._guard(method, lambda: send(self._socket, (method, args)))
        self._pending.append(reply)
        return reply

    def settle(self) -> None:
        """Wait for every answer under way.

        Raises:
            RemoteError: if a call raised over there that was sent without waiting for it.
        """
        for reply in list(self._pending):
            self._receive_until(reply)
            if reply.little:  # nobody waits for it but the sender's conscience
                reply.wait()

    def close(self) -> None:
        """Say goodbye and close. Harmless if the other side is gone."""
        with suppress(OSError):
            send(self._socket, _Goodbye())
        self._socket.close()

    def interrupt(self) -> None:
        """End a call that waits for its answer on another thread: it raises PeerLostError."""
        with suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Within it, answers may take as long as they take."""
        self._socket.settimeout(None)
        try:
            yield
        finally:
            self._socket.settimeout(self._timeout_s)

    def _receive_until(self, reply: Reply) -> None:
        while not reply.done:
            first = self._pending[0]
            began = time.perf_counter()
            with waiting(first.describe):
                first.value = self._guard(first.method, self._receive)
            self.meter.waited_s += time.perf_counter() - began
            first.done = True
            self._pending.popleft()

    def _receive(self) -> Any:
        body, tensors = receive_frame(self._socket)
        self.meter.received += len(body) + sum(tensor.nbytes for tensor in tensors)
        return unpack(body, tensors)

    def _guard(self, method: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"{self.name} did not answer '{method}' within {self._timeout_s:g} s."
            ) from error
        except (OSError, EOFError) as error:
            why = str(error) or "it closed"
            raise PeerLostError(
                f"The connection to {self.name} ended during '{method}': {why}."
            ) from error


class Reply:
    """The answer to one call, when it comes."""

    __slots__ = ("_peer", "done", "little", "method", "value")

    def __init__(self, peer: Peer, method: str, *, little: bool) -> None:
        self._peer = peer
        self.method = method
        self.little = little
        self.done = False
        self.value: object = None

    def describe(self) -> str:
        """What is waited for, for whoever looks into a hang."""
        return f"{self._peer.name} to answer '{self.method}'{self._peer.about}"

    def wait(self, *, patiently: bool = False) -> Any:
        """The answer, waited for.

        Args:
            patiently: wait without a limit here, where the other side has one of its own, or the
                launcher ends the job.

        Raises:
            RemoteError: if the call raised over there.
            WaitTimeoutError: if the answer did not come within the peer's limit.
            PeerLostError: if the process over there is gone.
        """
        if patiently:
            with self._peer.patient():
                self._peer._receive_until(self)
        self._peer._receive_until(self)
        if isinstance(self.value, _Failure):
            self.value.raise_here()
        return self.value


def _no_delay(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
