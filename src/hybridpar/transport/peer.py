"""`Peer`: the calling side of one connection, and `Reply`, an answer to be."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hybridpar.errors import PeerLostError, WaitTimeoutError
from hybridpar.frames import Meter, receive_frame, send, unpack
from hybridpar.transport.protocol import HELLO, VERSION, WELCOME, Failure, Goodbye, no_delay
from hybridpar.waits import waiting


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
            no_delay(self._socket)
            self._socket.sendall(HELLO.pack(VERSION, token, me.encode()))
            welcome = self._socket.recv(1)
        except ConnectionResetError:  # how a refusal shows if not all was read over there
            pass
        except OSError as error:
            raise PeerLostError(f"{me} cannot reach {name} at {address}: {error}") from error
        if welcome != WELCOME:
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
            send(self._socket, Goodbye())
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
        if isinstance(self.value, Failure):
            self.value.raise_here()
        return self.value
