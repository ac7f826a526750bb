"""`Roles`: how many processes play which part."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hybridpar.errors import SpecError

Role: TypeAlias = Literal["master", "ps", "trainer"]
TRAINERS, SERVERS = "HYBRIDPAR_TRAINERS", "HYBRIDPAR_SERVERS"  # set by `hybridpar run`

_logger = logging.getLogger("hybridpar")


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """The processes of a job: one master, and as many trainers and servers as asked for.

    Args:
        trainers: number of trainers, at least 1.
        servers: number of parameter servers, at least 1.

    Raises:
        SpecError: if a number is not a whole one of at least 1.

    Example:
        >>> Roles(trainers=2, servers=1).names
        ('master', 'ps0', 'trainer0', 'trainer1')
    """

    trainers: int
    servers: int = 1

    def __post_init__(self) -> None:
        for what in ("trainers", "servers"):
            value = getattr(self, what)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SpecError(f"Roles got {what}={value!r}. Give a whole number of at least 1.")

    @classmethod
    def of(cls, roles: Roles | Mapping[str, int]) -> Roles:
        """Roles from a plain mapping such as ``{"trainer": 2, "ps": 1}``.

        Raises:
            SpecError: if the mapping names another role, or no trainer.
        """
        if isinstance(roles, Roles):
            return roles
        if not isinstance(roles, Mapping):
            raise SpecError(
                f"roles is {roles!r}. Give hybridpar.Roles(trainers=2, servers=1) "
                'or {"trainer": 2, "ps": 1}.'
            )
        unknown = set(roles) - {"trainer", "ps", "master"}
        if unknown or roles.get("master", 1) != 1 or "trainer" not in roles:
            raise SpecError(
                f'roles is {dict(roles)!r}. Name "trainer" and "ps" with their numbers; there is '
                'always one "master".'
            )
        return cls(trainers=roles["trainer"], servers=roles.get("ps", 1))

    @classmethod
    def asked_for(cls, roles: Roles | Mapping[str, int] | None) -> Roles:
        """The roles that a script gives, or those that ``hybridpar run`` puts in their place.

        Args:
            roles: the script's; None leaves them to ``hybridpar run``.

        Raises:
            SpecError: if nobody says how many trainers there are, or a number is none.
        """
        given = None if roles is None else cls.of(roles)
        trainers = _from_environment(TRAINERS, given.trainers if given else None)
        servers = _from_environment(SERVERS, given.servers if given else 1)
        if trainers is None or servers is None:
            raise SpecError(
                "No roles are given. Pass roles=hybridpar.Roles(trainers=2, servers=1), or run the "
                "script by: hybridpar run --trainers 2 --servers 1 SCRIPT."
            )
        asked = cls(trainers=trainers, servers=servers)
        if given is not None and asked != given:
            _logger.warning("hybridpar run asks for %s in place of the script's %s", asked, given)
        return asked

    @property
    def names(self) -> tuple[str, ...]:
        """Every process's name."""
        return tuple(process_name(role, rank) for role, rank in self.members())

    def members(self) -> list[tuple[Role, int]]:
        """Every process's role and its rank within the role."""
        members: list[tuple[Role, int]] = [("master", 0)]
        members += [("ps", rank) for rank in range(self.servers)]
        members += [("trainer", rank) for rank in range(self.trainers)]
        return members


def process_name(role: Role, rank: int) -> str:
    """``"master"``, ``"ps0"``, ``"trainer0"``."""
    return role if role == "master" else f"{role}{rank}"


def _from_environment(name: str, default: int | None) -> int | None:
    text = os.environ.get(name)
    if not text:
        return default
    if not text.isdecimal():
        raise SpecError(f"{name} is {text!r}. Give a whole number of at least 1, or unset it.")
    return int(text)
