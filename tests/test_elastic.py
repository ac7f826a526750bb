"""The parts of a job under torchrun, each in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

import hybridpar as hp
from hybridpar.errors import PeerLostError, SpecError, WaitTimeoutError, WorkerError
from hybridpar.launch.assignment import Report
from hybridpar.launch.checkin import Decision, Presence, check_in
from hybridpar.launch.heartbeat import Beating, Lookout
from hybridpar.launch.interfaces import choose_interface, interfaces
from hybridpar.launch.pulse import Pulse
from hybridpar.launch.seats import Seat, check_count, take_seats
from hybridpar.launch.surroundings import Surroundings
from hybridpar.transport import Peer

TOKEN = b"t" * 32
BEATING = Beating(0.1, 1.0)


# --- seats ---------------------------------------------------------------------------------------


def names(pins: list[str], nodes: list[int], roles: hp.Roles) -> list[str]:
    hosts = [f"host{node}" for node in nodes]
    return [f"{s.name}@{s.local_rank}" for s in take_seats(pins, hosts, nodes, roles)]


@pytest.mark.parametrize(
    ("pins", "wanted"),
    [
        (["", "", "", "", ""], ["master@0", "ps0@0", "ps1@0", "trainer0@0", "trainer1@0"]),
        (["", "", "ps", "ps", ""], ["master@0", "trainer0@0", "ps0@0", "ps1@1", "trainer1@0"]),
        (
            ["ps", "ps", "", "", "master"],
            ["ps0@0", "ps1@1", "trainer0@0", "trainer1@1", "master@0"],
        ),
        (["trainer", "", "", "", ""], ["trainer0@0", "master@0", "ps0@0", "ps1@1", "trainer1@0"]),
    ],
)
def test_seats_follow_the_pins_and_then_the_ranks(pins: list[str], wanted: list[str]) -> None:
    assert names(pins, [0, 0, 1, 1, 2], hp.Roles(trainers=2, servers=2)) == wanted


def test_too_many_pins_name_the_hosts() -> None:
    with pytest.raises(SpecError, match=r"=ps is set for 2 processes \(on host0, host1\), but.* 1"):
        names(["ps", "", "ps", ""], [0, 0, 1, 1], hp.Roles(trainers=2, servers=1))


@pytest.mark.parametrize(
    ("size", "hosts", "line"),
    [(3, 2, "--nnodes=2 --nproc-per-node=2"), (5, 3, "--nnodes=1 --nproc-per-node=4")],
)
def test_a_wrong_count_gives_a_line_that_fits(size: int, hosts: int, line: str) -> None:
    with pytest.raises(SpecError, match=f"needs 4: .*torchrun {line} train.py"):
        check_count(size, hosts, hp.Roles(trainers=2, servers=1))


# --- interfaces ----------------------------------------------------------------------------------


@pytest.fixture
def _no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HYBRIDPAR_INTERFACE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_names")
def test_one_host_takes_the_loopback_and_a_name_comes_first(monkeypatch) -> None:
    assert interfaces()["lo"] == "127.0.0.1"
    assert choose_interface(None, "anything", 1, 1) == ("127.0.0.1", "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(SpecError, match="GLOO_SOCKET_IFNAME names the interface 'eth77', but"):
        choose_interface(None, "127.0.0.1", 1, 2)
    monkeypatch.setenv("HYBRIDPAR_INTERFACE", "eth78")
    with pytest.raises(SpecError, match=r"eth78.* It has .*lo \(127\.0\.0\.1\)"):
        choose_interface(None, "127.0.0.1", 1, 2)
    assert choose_interface("lo", "127.0.0.1", 1, 2) == ("127.0.0.1", "lo")


@pytest.mark.usefixtures("_no_names")
@pytest.mark.parametrize(
    ("master", "words"),
    [("127.0.0.1", "is 127.0.0.1 on host .*: the loopback"), ("no.such.invalid", "finds no IPv4")],
)
def test_a_master_that_others_cannot_reach(master: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        choose_interface(None, master, 1, 2)


def test_without_torchrun_there_are_no_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("RANK", "3")
    assert Surroundings.read() is None


# --- checking in ---------------------------------------------------------------------------------


def presence(rank: int, **changes) -> Presence:
    fields = {"facts": {"the version": "1"}, "host": f"host{rank}", "pin": ""}
    fields |= {"address": f"10.0.0.{rank}"} | changes
    drawn = f"{rank}-{time.monotonic_ns()}"
    return Presence(drawn=drawn, rank=rank, node=rank, devices=0, restarts=0, **fields)


def decide(presences: list[Presence]) -> Decision:
    return Decision("", [("ps", p.rank, p.host, 0) for p in presences], "cpu", "ab", [], 0, "")


def meet(
    store: HashStore, present: list[Presence], size: int = 3, limit_s: float = 20.0, tokens=None
) -> list[object]:
    """What each gets: a decision or an exception."""
    got: list[object] = [None] * len(present)

    def one(number: int) -> None:
        token = (tokens or [b""] * size)[number]
        try:
            got[number] = check_in(store, present[number], size, token, limit_s, decide)
        except hp.HybridParError as error:
            got[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(present))]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(30)
    return got


def test_those_who_meet_again_are_not_misled_by_what_is_left() -> None:
    store = HashStore()
    calls = set()
    for _ in range(3):
        first, *others = meet(store, [presence(rank) for rank in range(3)])
        assert isinstance(first, Decision)
        assert [seat[2] for seat in first.seats] == ["host0", "host1", "host2"]
        for other in others:
            assert (other.call, len(other.seats)) == (first.call, 3)
        calls.add(first.call)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"facts": {"the version": "2"}},
            r"disagree on the version: rank 0 \(host host0\) has 1, rank 2 \(host host2\) has 2",
        ),
        (
            {"address": "127.0.0.1"},
            r"rank 2 \(host host2\) would listen at the loopback, 127\.0\.0\.1, which rank 0 "
            r"\(host host0\) cannot reach",
        ),
        ({"problem": "it is broken"}, r"rank 2 \(host host2\): it is broken"),
    ],
)
def test_every_process_hears_the_same_refusal(change: dict[str, object], words: str) -> None:
    got = meet(HashStore(), [presence(0), presence(1), presence(2, **change)])
    for error in got:
        assert isinstance(error, SpecError)
        with pytest.raises(SpecError, match=words):
            raise error
    assert len(set(map(str, got))) == 1


def test_another_token_is_refused() -> None:
    tokens = [b"a", b"a", b"b"]
    got = meet(HashStore(), [presence(rank) for rank in range(3)], tokens=tokens)
    for error in got:
        assert "rank 2 (host host2) does not have the same HYBRIDPAR_TOKEN as rank 0" in str(error)


def test_a_process_that_does_not_come_is_named_to_all() -> None:
    got = meet(HashStore(), [presence(0), presence(1)], limit_s=0.5)
    assert isinstance(got[0], WaitTimeoutError)
    for error in got:
        assert "rank 2 of 3 has not come to launch() within 0.5 s" in str(error)
        assert "rank 1 (host host1)" in str(error)


# --- signs of life -------------------------------------------------------------------------------

SEATS = [Seat("master", 0, "a", 0), Seat("ps", 0, "b", 0), Seat("trainer", 0, "b", 0)]


class Job:
    """A lookout, and a pulse for each seat but the absent."""

    def __init__(self, *absent: str, start_s: float = 20.0) -> None:
        self.lookout = Lookout(SEATS, "127.0.0.1", TOKEN, BEATING, start_s)
        self.heard: dict[str, WorkerError] = {}
        self.pulses = {seat.name: self._pulse(seat) for seat in SEATS if seat.name not in absent}

    def _pulse(self, seat: Seat) -> Pulse:
        def fail(error: WorkerError) -> None:
            self.heard[seat.name] = error
            self.pulses[seat.name].interrupt()

        return Pulse(seat, SEATS, self.lookout.address, TOKEN, BEATING, fail)

    def start(self) -> None:
        for pulse in self.pulses.values():
            pulse.start()

    def wait(self, *names: str) -> str:
        """The one error that all of these have heard."""
        limit = time.monotonic() + 5.0
        while self.heard.keys() < set(names):
            assert time.monotonic() < limit, f"only {list(self.heard)} have heard"
            time.sleep(0.01)
        assert len(set(map(str, self.heard.values()))) == 1
        return str(self.heard[names[0]])

    def end(self) -> None:
        for pulse in self.pulses.values():
            pulse._thread.join(5)
            pulse.close()
        self.lookout.wait_until_all_know()


def aside(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_everyone_gets_every_trainers_result() -> None:
    job = Job()
    job.start()
    results: dict[str, list[bytes]] = {}

    def finish(name: str) -> None:
        result = b"result" if name == "trainer0" else None
        results[name] = job.pulses[name].finish(result)

    threads = [aside(lambda name=name: finish(name)) for name in job.pulses]
    for thread in threads:
        thread.join(10)
    job.end()
    assert results == {name: [b"result"] for name in job.pulses}
    assert not job.heard


def test_a_report_is_heard_by_all_and_comes_before_consequences() -> None:
    job = Job()
    job.start()
    later = Report(host="b", cause="raised ValueError: bad", remote_traceback="tb", step=3)
    first = Report(host="b", cause="raised PeerLostError: gone", consequence=True)
    got: list[WorkerError] = []
    threads = [
        aside(lambda n=n, r=r: got.append(job.pulses[n].fail(r)))
        for n, r in (("ps0", first), ("trainer0", later))
    ]
    message = job.wait("master")
    for thread in threads:
        thread.join(5)
    job.end()
    assert message.startswith("trainer0 (host b, step 3) raised ValueError: bad")


def test_silence_is_a_loss_that_names_who_is_silent() -> None:
    job = Job("trainer0")
    silent = Peer("master", job.lookout.address, me="trainer0", token=TOKEN, timeout_s=5)
    job.start()
    silent.send("beat")  # one sign of life, and no more
    message = job.wait("master", "ps0")
    silent._socket.close()
    job.end()
    assert message.startswith("trainer0 (host b) gave no sign of life for 1.")


def test_a_connection_that_ends_is_a_loss_at_once() -> None:
    job = Job("trainer0")
    gone = Peer("master", job.lookout.address, me="trainer0", token=TOKEN, timeout_s=5)
    job.start()
    gone.call("beat")
    started = time.monotonic()
    gone._socket.close()
    message = job.wait("master", "ps0")
    assert time.monotonic() - started < 0.9, "it need not wait for silence"
    job.end()
    assert message.startswith("trainer0 (host b) died without a word")


def test_one_that_never_comes_is_named() -> None:
    job = Job("trainer0", start_s=0.5)
    job.start()
    message = job.wait("master", "ps0")
    job.end()
    assert message.startswith("trainer0 (host b) has not come within 0.5 s")


def test_a_process_of_another_job_is_refused() -> None:
    job = Job()
    with pytest.raises(PeerLostError, match="refused trainer0: it is not a process of this job"):
        Pulse(SEATS[2], SEATS, job.lookout.address, b"o" * 32, BEATING, print)
    job.start()
    threads = [aside(lambda p=p: p.finish(b"")) for p in job.pulses.values()]
    for thread in threads:
        thread.join(10)
    job.end()
    assert not job.heard


def test_the_limit_leaves_room_for_signs() -> None:
    with pytest.raises(SpecError, match="the limit at least three times the period"):
        Beating.checked(2.0, 5.0)
