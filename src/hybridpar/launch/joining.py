"""How a process that torchrun started finds its seat, its interface and the job's token."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import NamedTuple

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hybridpar.errors import PeerLostError, SpecError
from hybridpar.launch.checkin import Decision, Presence, check_in
from hybridpar.launch.heartbeat import Beating
from hybridpar.launch.interfaces import Interface, choose_interface
from hybridpar.launch.logs import LogSettings
from hybridpar.launch.roles import Roles
from hybridpar.launch.seats import Seat, check_count, check_pin, take_seats
from hybridpar.launch.surroundings import Surroundings

_START_S = 300.0  # the longest wait for the others at the start; timeout_s, if that is less
_TOKEN_LENGTH = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticSettings:
    """What `RoleLauncher` was told, as far as it matters under torchrun; see there."""

    roles: Roles
    device: str | None
    timeout_s: float
    num_threads: int | None
    share_memory: bool
    interface: str | None
    beating: Beating
    logs: LogSettings | None = None

    @property
    def start_s(self) -> float:
        """The longest wait for the others at the start, in seconds."""
        return min(_START_S, self.timeout_s)


class Joined(NamedTuple):
    """A process that has found the others.

    Attributes:
        seats: every process of the job, in the order of torchrun's ranks.
        me: this one.
        device: where the dense half runs.
        token: the job's secret.
        store: a part of torchrun's store that only this attempt of this job uses.
        interface: what to bind.
        attempt: how often the job has been restarted before.
    """

    seats: list[Seat]
    me: Seat
    device: str
    token: bytes
    store: Store
    interface: Interface
    attempt: int


def join(settings: ElasticSettings, here: Surroundings, train: Callable[..., object]) -> Joined:
    """Meet the other processes, and agree with them on everything.

    Raises:
        SpecError: if they do not fit together, or this one cannot take part.
        WaitTimeoutError: if one does not come; names it.
        PeerLostError: if torchrun's store cannot be reached.
    """
    problem, interface, token = "", Interface("", ""), b""
    try:
        check_pin(_pin())
        token = _token_of_environment()
        interface = choose_interface(settings.interface, here.master, here.port, here.num_nodes)
    except SpecError as error:
        problem = str(error)
    try:
        store = here.open_store(min(10.0, settings.start_s) if problem else settings.start_s)
    except PeerLostError as error:
        raise SpecError(problem) if problem else error from None
    decision = check_in(
        store,
        _presence(settings, here, train, interface.address, problem),
        here.world_size,
        token,
        settings.start_s,
        lambda presences: _decide(settings, here, presences, bool(token)),
    )
    store.set_timeout(datetime.timedelta(seconds=settings.timeout_s))
    seats = [Seat(*seat) for seat in decision.seats]  # type: ignore[arg-type]
    return Joined(
        seats=seats,
        me=seats[here.rank],
        device=decision.device,
        token=token or bytes.fromhex(decision.token),
        store=PrefixStore(decision.call, store),
        interface=interface,
        attempt=decision.attempt,
    )


def _pin() -> str:
    return os.environ.get("HYBRIDPAR_ROLE", "")


def _token_of_environment() -> bytes:
    """The token that ``HYBRIDPAR_TOKEN`` stands for; empty if it is not set."""
    text = os.environ.get("HYBRIDPAR_TOKEN", "")
    if text and len(text) < _TOKEN_LENGTH:
        raise SpecError(
            f"HYBRIDPAR_TOKEN has {len(text)} characters: too few to keep anyone out. Take at "
            f"least {_TOKEN_LENGTH} random ones, such as those of: openssl rand -hex 32"
        )
    return hashlib.sha256(text.encode()).digest() if text else b""


def _presence(
    settings: ElasticSettings,
    here: Surroundings,
    train: Callable[..., object],
    address: str,
    problem: str,
) -> Presence:
    return Presence(
        drawn=secrets.token_hex(16),
        rank=here.rank,
        node=here.node,
        host=here.host,
        address=address,
        pin=_pin(),
        devices=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        restarts=here.restarts,
        facts=_facts(settings, train),
        problem=problem,
    )


def _facts(settings: ElasticSettings, train: Callable[..., object]) -> dict[str, str]:
    """What must be the same everywhere: what explains most comes first."""
    import hybridpar  # it imports this module

    roles, beating = settings.roles, settings.beating
    name = f"{train.__module__}.{getattr(train, '__qualname__', type(train).__qualname__)}"
    return {
        "hybridpar's version": hybridpar.__version__,
        "torch's version": torch.__version__,
        "Python's version": ".".join(platform.python_version_tuple()[:2]),
        "the roles": f"trainers={roles.trainers}, servers={roles.servers}",
        "the train function": name,
        "the code of the train function": f"{name} with hash {_digest(train)}",
        "the device": str(settings.device),
        "timeout_s": f"{settings.timeout_s:g}",
        "heartbeat_s and heartbeat_limit_s": f"{beating.period_s:g} and {beating.limit_s:g}",
    }


def _digest(train: Callable[..., object]) -> str:
    """Of what a function does, wherever its file is."""
    code = getattr(train, "__code__", None)
    what = repr(_essence(code)) if isinstance(code, CodeType) else ""
    return hashlib.sha256(what.encode()).hexdigest()[:12]


def _essence(value: object) -> object:
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, [_essence(each) for each in value.co_consts]
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _decide(
    settings: ElasticSettings, here: Surroundings, presences: Sequence[Presence], has_token: bool
) -> Decision:
    """Rank 0's decision, once it knows that all agree."""
    check_count(here.world_size, here.num_nodes, settings.roles)
    seats = take_seats(
        [presence.pin for presence in presences],
        [presence.host for presence in presences],
        [presence.node for presence in presences],
        settings.roles,
    )
    device = settings.device or "cuda"
    for seat, presence in zip(seats, presences, strict=True):
        if seat.role == "trainer" and seat.local_rank >= presence.devices:
            device = settings.device or "cpu"
    return Decision(
        error="",
        seats=[(seat.role, seat.rank, seat.host, seat.local_rank) for seat in seats],
        device=device,
        token="" if has_token else secrets.token_bytes(32).hex(),
        drawn=[],
        attempt=max(presence.restarts for presence in presences),
        call="",
    )
