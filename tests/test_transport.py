"""Calls over real sockets, and rounds over real threads."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import hybridpar as hp
from hybridpar.gather import Gather
from hybridpar.messages import SlabLookup
from hybridpar.transport import Listener, Peer

TOKEN = bytes(range(32))


class World:
    """A listener, and whom it lost or let go."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.left: list[str] = []
        self.release = threading.Event()
        self.listener = Listener(
            "ps0", "127.0.0.1", TOKEN, self.handle,
            on_lost=self.lost.append, on_leave=self.left.append,
        )  # fmt: skip

    def handle(self, peer: str, method: str, args: tuple[object, ...]) -> object:
        if method == "echo":
            return args
        if method == "wait":
            return self.release.wait(10)
        if method == "passed_on":
            raise hp.RemoteError("ps7", "KeyError: 3", "its traceback")
        if method == "lost":
            raise hp.PeerLostError("trainer1 died")
        raise KeyError(f"{method} of {peer}")

    def connect(self, token: bytes = TOKEN, timeout_s: float = 10.0) -> Peer:
        return Peer("ps0", self.listener.address, me="trainer0", token=token, timeout_s=timeout_s)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.release.set()
    world.listener.close()
    limit = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < limit:
        time.sleep(0.01)


def test_values_and_tensors_cross_whole(world: World) -> None:
    peer = world.connect()
    tensors = [
        torch.randn(3, 4),
        torch.randn(6, 4).t(),  # not contiguous
        torch.empty(0, 5),
        torch.tensor(7),
        torch.arange(200_000),
        torch.tensor([True, False]),
        torch.randn(3).bfloat16(),
    ]
    lookup = SlabLookup(tensors[4], None)
    many = [torch.tensor([number]) for number in range(1500)]  # more than one sendmsg takes
    got, text, got_lookup, got_many = peer.call("echo", tensors, "text", lookup, many)
    for sent, received in zip(tensors + many, got + got_many, strict=True):
        assert torch.equal(sent, received)
        assert sent.dtype == received.dtype
    assert text == "text"
    assert torch.equal(got_lookup.indices, tensors[4])
    peer.close()


def test_replies_may_be_awaited_in_any_order(world: World) -> None:
    peer = world.connect()
    replies = [peer.send("echo", number) for number in range(5)]
    assert [reply.wait() for reply in reversed(replies)] == [(n,) for n in reversed(range(5))]
    peer.close()


def test_errors_come_back_with_origin_and_traceback(world: World) -> None:
    peer = world.connect()
    with pytest.raises(hp.RemoteError, match="ps0 failed: KeyError") as caught:
        peer.call("nonsense")
    assert caught.value.origin == "ps0"
    assert "in handle" in caught.value.remote_traceback
    with pytest.raises(hp.RemoteError) as caught:
        peer.call("passed_on")
    assert (caught.value.origin, caught.value.remote_traceback) == ("ps7", "its traceback")
    with pytest.raises(hp.PeerLostError, match="trainer1 died"):
        peer.call("lost")
    assert peer.call("echo", 1) == (1,)
    peer.close()


def test_a_wait_has_a_limit_that_names_the_peer(world: World) -> None:
    peer = world.connect(timeout_s=0.2)
    with pytest.raises(hp.WaitTimeoutError, match=r"ps0 did not answer 'wait' within 0.2 s"):
        peer.call("wait")
    peer.close()


def test_goodbye_and_loss_are_told_apart(world: World) -> None:
    world.connect().close()
    lost = world.connect()
    lost._socket.close()
    limit = time.monotonic() + 5
    while not (world.left and world.lost) and time.monotonic() < limit:
        time.sleep(0.01)
    assert (world.left, world.lost) == (["trainer0"], ["trainer0"])


def test_strangers_are_turned_away_before_anything_is_unpickled(world: World) -> None:
    with pytest.raises(hp.PeerLostError, match="refused trainer0: it is not a process of this job"):
        world.connect(token=bytes(32))
    with socket.create_connection(world.listener.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 200)
        stranger.settimeout(5)
        assert answer(stranger) == b""
    peer = world.connect()
    assert peer.call("echo") == ()
    peer.close()


def answer(stranger: socket.socket) -> bytes:
    """What comes back: nothing, the connection closed or reset."""
    try:
        return stranger.recv(1)
    except ConnectionError:
        return b""


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(hp.PeerLostError, match="trainer0 cannot reach ps0"):
        Peer("ps0", address, me="trainer0", token=TOKEN, timeout_s=1.0)


def in_threads(*calls: Callable[[], object]) -> list[object]:
    """Each call's result or exception, from a thread of its own."""
    results: list[object] = [None] * len(calls)

    def run(number: int, call: Callable[[], object]) -> None:
        try:
            results[number] = call()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return results


def test_a_round_acts_once_in_rank_order() -> None:
    seen: list[dict[int, str]] = []

    def action(items: dict[int, str]) -> str:
        seen.append(items)
        return "".join(items.values())

    gather: Gather[str, str] = Gather("ps0", action, 10)
    calls = [
        lambda rank=rank: gather.arrive("step 1", rank, "abc"[rank], lambda: range(3))
        for rank in (2, 0, 1)
    ]
    assert in_threads(*calls) == ["abc"] * 3
    assert [list(items) for items in seen] == [[0, 1, 2]]


def test_a_failing_action_fails_every_arrival() -> None:
    def action(items: dict[int, None]) -> None:
        raise ArithmeticError("bad")

    gather: Gather[None, None] = Gather("ps0", action, 10)
    calls = [lambda r=r: gather.arrive("step 1", r, None, lambda: range(2)) for r in range(2)]
    assert [str(error) for error in in_threads(*calls)] == ["bad"] * 2


def test_a_round_without_its_last_names_the_missing() -> None:
    gather: Gather[None, None] = Gather("ps0", lambda items: None, 0.2)
    calls = [lambda r=r: gather.arrive("step 1", r, None, lambda: range(4)) for r in (0, 2)]
    for error in in_threads(*calls):
        assert isinstance(error, hp.WaitTimeoutError)
        assert "ps0 waited 0.2 s at step 1 for trainer1, trainer3, in vain" in str(error)


def test_a_round_fails_at_once_when_someone_has_gone() -> None:
    gather: Gather[None, None] = Gather("ps0", lambda items: None, 60)
    gather.leave(1, "trainer1 died")
    (error,) = in_threads(lambda: gather.arrive("step 1", 0, None, lambda: range(2)))
    assert isinstance(error, hp.PeerLostError)
    assert "trainer1 died" in str(error)
