"""Memory that several processes of one machine see: tables, and gradients on their way.

A `Segment` is anonymous memory behind a file descriptor (``memfd_create``). Another process maps it
through ``/proc``, given its `Handle`. It has no name in any file system, so nothing is left of it
when its processes end, however they end. Where the system has no such memory, or the other process
is on another machine, there is none, and tensors cross by socket.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import secrets
import weakref
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

_SECRET_BYTES = 16
_ALIGNMENT = 64  # bytes: a cache line
_SMALLEST = 1 << 16  # bytes of a slot's first segment
_WRITABLE = 0x200  # PyBUF_WRITE
_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype = ctypes.py_object
_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


OutboxName: TypeAlias = tuple[int, int]
"""The id of the process that has it, and its number there."""


class Handle(NamedTuple):
    """What another process needs to map a segment.

    Attributes:
        pid: a process that has it.
        fd: its descriptor there.
        num_bytes: its size.
        secret: stands behind its last byte, and proves that it is this one.
    """

    pid: int
    fd: int
    num_bytes: int
    secret: bytes


class Segment:
    """Zeroed memory of this process that others can map; see :func:`new_segment`."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        secret = secrets.token_bytes(_SECRET_BYTES)
        os.ftruncate(fd, num_bytes + _SECRET_BYTES)
        os.pwrite(fd, secret, num_bytes)
        memory = mmap.mmap(fd, num_bytes + _SECRET_BYTES)
        _prefer_huge_pages(memory)
        self.handle = Handle(os.getpid(), fd, num_bytes, secret)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
        self.slot: tuple[OutboxName, int] | None = None  # of an outbox, if it is in one
        weakref.finalize(self, os.close, fd)


def new_segment(num_bytes: int) -> Segment | None:
    """Zeroed memory that others can map; None where the system has none."""
    if num_bytes == 0 or not hasattr(os, "memfd_create"):
        return None
    fd = -1
    try:
        fd = os.memfd_create("hybridpar")
        return Segment(fd, num_bytes)
    except OSError:
        if fd >= 0:
            os.close(fd)
        return None


def attach(handle: Handle) -> Tensor | None:
    """Another process's segment as (num_bytes,) uint8; None if it is out of reach."""
    try:
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with suppress(OSError, ValueError):
            memory = mmap.mmap(fd, handle.num_bytes + _SECRET_BYTES)
            if memory[handle.num_bytes :] == handle.secret:
                return torch.frombuffer(memory, dtype=torch.uint8)[: handle.num_bytes]
    finally:
        os.close(fd)
    return None


def private_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zeroed tensor of this process alone, in huge pages where the system gives them.

    They spare a large table that is read here and there most of its misses in the page tables.
    """
    num_bytes = _num_bytes(shape, dtype)
    if num_bytes < mmap.PAGESIZE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _prefer_huge_pages(memory)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def as_tensor(memory: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The beginning of some (num_bytes,) uint8 memory as a tensor."""
    return memory[: _num_bytes(shape, dtype)].view(dtype).view(shape)


class Outbox:
    """Where a process puts the tensors of its calls to one other, for that to read in place.

    A tensor taken from it crosses as a reference (`reference_to`, by which `frames` asks). Calls
    take turns with a few slots, and a slot's memory is used again after ``slots`` calls, so by then
    the first must have been answered.

    Args:
        slots: one more than the calls that may be under way.
    """

    def __init__(self, slots: int) -> None:
        self.name: OutboxName = os.getpid(), next(_numbers)
        self._slots: list[list[Segment]] = [[] for _ in range(slots)]
        self._current = 0
        self._used = 0

    def begin(self) -> None:
        """A new call: the tensors taken from now on are for it."""
        self._current = (self._current + 1) % len(self._slots)
        self._used = 0
        del self._slots[self._current][:-1]  # the last is the largest

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """An uninitialised tensor for the call begun last; None where there is no such memory."""
        segments = self._slots[self._current]
        needed = _num_bytes(shape, dtype)
        if needed == 0:
            return torch.empty(shape, dtype=dtype)
        room = segments[-1].bytes.numel() if segments else 0
        if self._used + needed > room:
            segment = new_segment(max(2 * room, 2 * needed, _SMALLEST))
            if segment is None:
                return None
            segment.slot = self.name, self._current
            segments.append(segment)
            _lent[segment.bytes.data_ptr()] = segment
            self._used = 0
        start = self._used
        self._used += -(-needed // _ALIGNMENT) * _ALIGNMENT
        return as_tensor(segments[-1].bytes[start:], shape, dtype)

    def put(self, tensor: Tensor) -> Tensor:
        """A tensor's copy in it; the tensor itself where there is no such memory."""
        taken = self.take(tuple(tensor.shape), tensor.dtype)
        return tensor if taken is None else taken.copy_(tensor)


_numbers = itertools.count(1)
# By the address of their memory, the segments that outboxes of this process hold.
_lent: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()
# By process and slot, what this process has mapped of other processes' outboxes.
_mapped: dict[tuple[OutboxName, int], tuple[Handle, Tensor]] = {}


def reference_to(tensor: Tensor) -> tuple[Any, ...] | None:
    """What `referred` makes the tensor of in another process; None unless it is in an outbox."""
    segment = _lent.get(tensor.untyped_storage().data_ptr())
    if segment is None:
        return None
    start = tensor.storage_offset() * tensor.element_size()
    return segment.slot, segment.handle, start, tuple(tensor.shape), tensor.dtype


def referred(
    slot: tuple[OutboxName, int],
    handle: Handle,
    start: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    """The tensor that another process lent."""
    known = _mapped.get(slot)
    if known is None or known[0] != handle:  # a new slot, or one that has grown
        memory = attach(handle)
        if memory is None:
            raise OSError(f"the memory of process {handle.pid} is out of reach")
        known = _mapped[slot] = handle, memory
    return as_tensor(known[1][start:], shape, dtype)


def forget(outbox: OutboxName) -> None:
    """Unmap another process's outbox: nothing more will come from it."""
    for slot in [slot for slot in _mapped if slot[0] == outbox]:
        del _mapped[slot]


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for length in shape:
        size *= length
    return size


def _prefer_huge_pages(memory: mmap.mmap) -> None:
    with suppress(OSError, AttributeError):  # a kernel or system without them
        memory.madvise(mmap.MADV_HUGEPAGE)


def bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's own memory (torch offers no buffer of it without NumPy)."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    view: memoryview = _memory(tensor.data_ptr(), size, _WRITABLE)
    return view
