"""How the processes that torchrun started meet: do they belong together, and who plays what.

Rank 0 calls a number that nobody has called before; every process answers it with a `Presence`;
rank 0 compares them all and posts its `Decision`. The store outlives an attempt of torchrun's, and
the restart count, TORCHELASTIC_RESTART_COUNT, may differ between hosts: an agent whose workers were
well restarts them without counting. So what tells one attempt from the last is the number called,
and that the decision repeats the number which this process has drawn for itself.

What crosses here is JSON, never a pickle: whoever reaches torchrun's store can write to it.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from hybridpar.errors import SpecError, WaitTimeoutError

_POLL_S = 0.03
_READ_S = 3.0  # how long rank 0 waits for the others to read why the job cannot start


@dataclass(frozen=True, kw_only=True, slots=True)
class Presence:
    """What a process says of itself.

    Attributes:
        drawn: a number that only this call of launch has.
        rank: torchrun's rank.
        node: the number of its torchrun, ``GROUP_RANK``.
        host: the name of its host.
        address: what it would listen at; empty if it has a problem.
        pin: what its host's ``HYBRIDPAR_ROLE`` says; empty for nothing.
        devices: how many CUDA devices it sees.
        restarts: how often its torchrun has restarted.
        facts: what must be the same everywhere, by what it is called.
        proof: of the token from the environment, for the number called; empty without one.
        problem: why it cannot take part; empty if it can.
    """

    drawn: str
    rank: int
    node: int
    host: str
    address: str
    pin: str
    devices: int
    restarts: int
    facts: dict[str, str]
    proof: str = ""
    problem: str = ""

    @classmethod
    def read(cls, text: bytes) -> Presence:
        """From JSON, which another version of hybridpar may have written."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in json.loads(text).items() if name in known})

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host})"


class Decision(NamedTuple):
    """What rank 0 makes of the presences.

    Attributes:
        error: why the job cannot start; empty if it can.
        seats: each process's (role, rank, host, local rank), in the order of torchrun's ranks.
        device: where the dense half runs.
        token: the job's token in hexadecimal; empty if the environment has it.
        drawn: the number that each process drew for itself.
        attempt: how often the job has been restarted, as far as any torchrun has counted.
        call: the number that rank 0 called: a prefix of the store that nobody has used before.
    """

    error: str
    seats: list[tuple[str, int, str, int]]
    device: str
    token: str
    drawn: list[str]
    attempt: int
    call: str


def difference(presences: list[Presence]) -> str:
    """What the presences disagree on, with both sides and the remedy; empty if nothing."""
    first = presences[0]
    for fact, value in first.facts.items():
        for other in presences:
            if other.facts.get(fact) != value:
                return (
                    f"The hosts disagree on {fact}: {first} has {value}, {other} has "
                    f"{other.facts.get(fact, 'none')}. Run the same script, with the same versions "
                    "and settings, on every host."
                )
    return ""


def unreachable(presences: list[Presence]) -> str:
    """Who would listen at the loopback, though there are other hosts; empty if nobody."""
    for presence in presences:
        for other in presences:
            if presence.address.startswith("127.") and presence.host != other.host:
                return (
                    f"{presence} would listen at the loopback, {presence.address}, which {other} "
                    "cannot reach. Name another interface with HYBRIDPAR_INTERFACE, or unset it "
                    "and GLOO_SOCKET_IFNAME."
                )
    return ""


def prove(token: bytes, call: str, rank: int) -> str:
    """What shows that a process knows the token, without saying it."""
    return hmac.new(token, f"{call} {rank}".encode(), "sha256").hexdigest()


def check_in(
    store: Store,
    mine: Presence,
    world_size: int,
    token: bytes,
    limit_s: float,
    decide: Callable[[list[Presence]], Decision],
) -> Decision:
    """Meet all other processes.

    Args:
        store: torchrun's store.
        mine: this process's presence.
        world_size: how many processes torchrun started.
        token: the token from the environment; empty without one.
        limit_s: the longest wait for the others.
        decide: called on rank 0 with all presences that agree, in the order of their ranks.

    Raises:
        SpecError: on every process, if they do not fit together.
        WaitTimeoutError: if some process does not come; names it.
    """
    if mine.rank == 0:
        decision = _preside(store, mine, world_size, token, limit_s, decide)
    else:
        decision = _attend(store, mine, token, limit_s)
    if decision.error:
        raise SpecError(decision.error)
    return decision


def _preside(
    store: Store,
    mine: Presence,
    world_size: int,
    token: bytes,
    limit_s: float,
    decide: Callable[[list[Presence]], Decision],
) -> Decision:
    call = secrets.token_hex(16)
    store.set("call", call)
    came = _gather(store, mine, call, world_size, limit_s)
    missing = [str(rank) for rank in range(world_size) if rank not in came]
    if missing:
        error = (
            f"rank {', '.join(missing)} of {world_size} has not come to launch() within "
            f"{limit_s:g} s. Present: {', '.join(map(str, came.values()))}. See what torchrun "
            "printed on the other hosts."
        )
        decision = _refusal(error)
    else:
        decision = _judge([came[rank] for rank in range(world_size)], call, token, decide)
    drawn = [presence.drawn for presence in came.values()]
    decision = decision._replace(call=call, drawn=drawn)
    store.set(f"{call}/decision", json.dumps(decision._asdict()))
    if decision.error:
        # The store ends with this host's torchrun, and that with this process: they must read it.
        deadline = time.monotonic() + _READ_S
        while store.add(f"{call}/read", 0) < len(came) - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    if missing:
        raise WaitTimeoutError(decision.error)
    return decision


def _gather(
    store: Store, mine: Presence, call: str, world_size: int, limit_s: float
) -> dict[int, Presence]:
    """Those who came within the limit, by rank."""
    came = {0: mine}
    deadline = time.monotonic() + limit_s
    while len(came) < world_size and time.monotonic() < deadline:
        for rank in range(1, world_size):
            if rank not in came and store.check([f"{call}/{rank}"]):
                came[rank] = Presence.read(store.get(f"{call}/{rank}"))
        time.sleep(_POLL_S)
    return came


def _judge(
    presences: list[Presence],
    call: str,
    token: bytes,
    decide: Callable[[list[Presence]], Decision],
) -> Decision:
    error = difference(presences)
    for presence in presences:
        if not error and presence.problem:
            error = f"{presence}: {presence.problem}"
        wanted = prove(token, call, presence.rank) if token else ""
        if not error and presence.rank and not hmac.compare_digest(presence.proof, wanted):
            error = (
                f"{presence} does not have the same HYBRIDPAR_TOKEN as {presences[0]}, or only one "
                "of them has it. Set the same on every host, or on none."
            )
    error = error or unreachable(presences)
    if error:
        return _refusal(error)
    try:
        return decide(presences)
    except SpecError as refused:
        return _refusal(str(refused))


def _refusal(error: str) -> Decision:
    return Decision(error, [], "", "", [], 0, "")


def _attend(store: Store, mine: Presence, token: bytes, limit_s: float) -> Decision:
    """Answer each number called until a decision repeats ours: earlier ones may be left over."""
    answered = ""
    deadline = time.monotonic() + limit_s + 5  # rank 0, which can name the missing, comes first
    while time.monotonic() < deadline:
        call = store.get("call").decode() if store.check(["call"]) else ""
        if call != answered:
            proof = prove(token, call, mine.rank) if token else ""
            presence = dataclasses.asdict(dataclasses.replace(mine, proof=proof))
            store.set(f"{call}/{mine.rank}", json.dumps(presence))
            answered = call
        if call and store.check([f"{call}/decision"]):
            decision = Decision(**json.loads(store.get(f"{call}/decision")))
            if mine.drawn in decision.drawn:
                store.add(f"{call}/read", 1)
                return decision
        time.sleep(_POLL_S)
    raise WaitTimeoutError(
        f"rank 0 has not come to launch() within {limit_s:g} s; {mine} waited for it. See what "
        "torchrun printed on its host."
    )
