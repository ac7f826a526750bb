"""Messages on a socket: any picklable value, its tensors' bytes sent straight from their memory.

A frame is

    two uint32 lengths · pickled tensor dtypes and shapes · pickled value · tensors' bytes

Tensors leave from and arrive in their own memory, on the CPU, without a copy in between; one that
lies in memory which both processes see (`shared_memory.Outbox`) crosses as a reference.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridpar.shared_memory import bytes_of, reference_to, referred

_LENGTHS = struct.Struct("!II")
_MAX_PARTS = 512  # sendmsg takes at most IOV_MAX (1024 on Linux) buffers


class Meter:
    """What has crossed one connection, in bytes, and how long its calling side has waited."""

    __slots__ = ("received", "sent", "waited_s")

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0
        self.waited_s = 0.0


class Packed(NamedTuple):
    """A message as the buffers to send, and the tensors whose memory they are."""

    parts: list[memoryview]
    tensors: list[Tensor]


def send(connection: socket.socket, message: object) -> int:
    """Send one message whole; the bytes that it took."""
    return send_packed(connection, pack(message))


def pack(message: object) -> Packed:
    """A message as the buffers to send; raises what pickling it raises."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(message)
    shapes = pickle.dumps([(tensor.dtype, tuple(tensor.shape)) for tensor in pickler.tensors])
    body = buffer.getvalue()
    head = _LENGTHS.pack(len(shapes), len(body)) + shapes + body
    parts = [memoryview(head)] + [bytes_of(tensor) for tensor in pickler.tensors]
    return Packed([part for part in parts if len(part)], pickler.tensors)


def unpack(body: bytes, tensors: list[Tensor]) -> Any:
    """The message of a frame; raises what unpickling it raises."""
    _arriving.tensors = tensors
    try:
        return pickle.loads(body)
    finally:
        _arriving.tensors = []


def send_packed(connection: socket.socket, packed: Packed) -> int:
    """Send a packed message whole; the bytes that it took."""
    parts = packed.parts
    total = 0
    while parts:
        sent = connection.sendmsg(parts[:_MAX_PARTS])
        total += sent
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if sent:
            parts[0] = parts[0][sent:]
    return total


def receive_frame(connection: socket.socket) -> tuple[bytes, list[Tensor]]:
    """Receive one message's pickled body and its tensors.

    Raises:
        EOFError: if the connection ends before.
    """
    lengths = bytearray(_LENGTHS.size)
    receive_into(connection, memoryview(lengths))
    num_shapes, num_body = _LENGTHS.unpack(lengths)
    head = bytearray(num_shapes + num_body)
    receive_into(connection, memoryview(head))
    tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in pickle.loads(head[:num_shapes])]
    for tensor in tensors:
        receive_into(connection, bytes_of(tensor))
    return bytes(head[num_shapes:]), tensors


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill a buffer; raises EOFError if the connection ends before."""
    while len(view):
        received = connection.recv_into(view)
        if received == 0:
            raise EOFError
        view = view[received:]


class _Pickler(pickle.Pickler):
    """Takes the tensors out of what it pickles, and leaves their numbers."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.dispatch_table = {Tensor: self._take, nn.Parameter: self._take}

    def _take(self, tensor: Tensor) -> tuple[Any, ...]:
        if tensor.is_nested:
            raise TypeError("a nested tensor cannot be sent")
        reference = reference_to(tensor) if tensor.device.type == "cpu" else None
        if reference is not None:
            return referred, reference
        self.tensors.append(tensor.detach().cpu().contiguous())
        return _arrived, (len(self.tensors) - 1,)


_arriving = threading.local()  # the tensors of the message that this thread unpickles


def _arrived(number: int) -> Tensor:
    tensor: Tensor = _arriving.tensors[number]
    return tensor
