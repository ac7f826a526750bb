"""Memory that several processes see: by hand, and under a whole world."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os

import pytest
import torch

import hybridpar as hp
import reference
import shared
from hybridpar import frames, shared_memory
from hybridpar.shared_memory import Outbox, as_tensor, attach, new_segment
from test_exactness import CLOSE, STEPS, assert_same
from worlds import CASES, Case, Trained, all_cases

SOCKETS = functools.partial(
    hp.RoleLauncher, hp.Roles(trainers=2, servers=2), share_memory=False, device="cpu"
)


def test_another_process_sees_what_is_written() -> None:
    segment = new_segment(64)
    assert segment is not None
    as_tensor(segment.bytes, (16,), torch.float32).fill_(3.0)
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=shared.double, args=(segment.handle, theirs))
    process.start()
    assert ours.poll(20)
    assert ours.recv() is True
    process.join(20)
    process.close()
    for end in (ours, theirs):
        end.close()
    assert as_tensor(segment.bytes, (16,), torch.float32).tolist() == [6.0] * 16


def test_what_is_not_the_segment_is_not_mapped() -> None:
    segment = new_segment(64)
    assert segment is not None
    assert attach(segment.handle) is not None
    assert attach(segment.handle._replace(secret=bytes(16))) is None
    assert attach(segment.handle._replace(fd=9999)) is None
    assert attach(segment.handle._replace(pid=1 << 30)) is None
    assert attach(segment.handle._replace(num_bytes=1 << 20)) is None


def test_nothing_is_left_of_a_segment() -> None:
    gc.collect()
    files = set(os.listdir("/proc/self/fd"))
    segment = new_segment(1 << 20)
    assert segment is not None
    kept = segment.bytes
    handle = segment.handle
    del segment
    gc.collect()
    assert kept.sum() == 0, "the memory lasts as long as a tensor on it"
    assert attach(handle) is None
    del kept
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == files


def test_tensors_of_an_outbox_cross_as_references() -> None:
    outbox = Outbox(2)
    for number in range(5):
        outbox.begin()
        values = torch.full((30 << number, 1000), float(number))  # grows beyond any slot
        lent = outbox.put(values)
        packed = frames.pack({"lent": lent, "own": torch.ones(3)})
        assert sum(map(len, packed.parts)) < 1000
        body = bytes(packed.parts[0])[8:]
        lengths = frames._LENGTHS.unpack(bytes(packed.parts[0])[:8])
        message = frames.unpack(body[lengths[0] :], [torch.ones(3)])
        assert torch.equal(message["lent"], values)
        message["lent"].add_(1.0)
        assert torch.equal(lent, values + 1.0), "the same memory"
    assert len(shared_memory._mapped) == 2, "a slot that has grown is mapped once"
    shared_memory.forget(outbox.name)
    assert not shared_memory._mapped
    del outbox, lent, packed, message
    gc.collect()


def test_an_outbox_keeps_a_call_apart_from_the_one_before() -> None:
    outbox = Outbox(2)
    outbox.begin()
    assert outbox.put(torch.empty(0, 3)).shape == (0, 3)
    tensors = []
    for number in range(4):
        outbox.begin()
        tensors.append(outbox.put(torch.full((10,), number)))
        if number:
            assert tensors[-2].tolist() == [number - 1] * 10


def test_without_such_memory_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert new_segment(64) is None
    outbox = Outbox(1)
    outbox.begin()
    values = torch.ones(3)
    assert outbox.put(values) is values
    assert shared_memory.reference_to(values) is None


@functools.cache
def by_sockets() -> list[list[Trained]]:
    return SOCKETS().run(all_cases, (STEPS,))


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_sockets_alone_train_the_same(case: Case) -> None:
    wanted = reference.train(case._replace(sharding=""), [STEPS] * 2)
    for rank in range(2):
        assert_same(by_sockets()[rank][CASES.index(case)], wanted[rank])


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_trainers_read_tables_themselves_where_they_may(consistency: str) -> None:
    roles = hp.Roles(trainers=2, servers=2)
    for share, wanted in ((True, {"a": True, "limited": False}), (False, {})):
        launcher = hp.RoleLauncher(roles, share_memory=share, device="cpu")
        for read_here, files in launcher.run(shared.what_is_shared, (consistency,)):
            assert read_here == (wanted or {"a": False, "limited": False})
            assert files[1] == files[0], "a step opens no file"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_wire_rounds_what_is_sent_and_nothing_else(dtype: torch.dtype) -> None:
    exact = SOCKETS().run(shared.rows_after, (torch.float32,))[0]
    rounded = SOCKETS().run(shared.rows_after, (dtype,))[0]
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(exact, rounded, atol=0.02, rtol=0.02)
    here = hp.launch(shared.rows_after, roles={"trainer": 2, "ps": 2}, args=(dtype,))[0]
    torch.testing.assert_close(exact, here, **CLOSE)


def test_a_wire_dtype_that_does_not_exist_is_refused() -> None:
    with pytest.raises(hp.WorkerError, match=r"wire_dtype is torch.int8\. Choose torch.float32"):
        hp.launch(shared.rows_after, roles={"trainer": 1, "ps": 1}, args=(torch.int8,))
