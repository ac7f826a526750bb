"""Which process of a torchrun job plays which role: by rank, or as its host asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

from hybridpar.errors import SpecError
from hybridpar.launch.roles import Role, Roles, process_name


class Seat(NamedTuple):
    """One process of the job.

    Attributes:
        role: the part it plays.
        rank: its rank within the role.
        host: the name of its host.
        local_rank: how many processes of its role and host come before it.
    """

    role: Role
    rank: int
    host: str
    local_rank: int

    @property
    def name(self) -> str:
        """The process's name."""
        return process_name(self.role, self.rank)

    def __str__(self) -> str:
        return f"{self.name} (host {self.host})"


def check_pin(pin: str) -> None:
    """Check what a host's ``HYBRIDPAR_ROLE`` says.

    Raises:
        SpecError: if it names no role.
    """
    if pin and pin not in get_args(Role):
        raise SpecError(f"HYBRIDPAR_ROLE is '{pin}'. Set it to master, ps or trainer, or unset it.")


def check_count(world_size: int, num_hosts: int, roles: Roles) -> None:
    """Check that torchrun started as many processes as the roles need.

    Raises:
        SpecError: if not; it says how many are needed.
    """
    needed = len(roles.names)
    if world_size == needed:
        return
    spread = f"--nnodes={num_hosts} --nproc-per-node={needed // num_hosts}"
    if needed % num_hosts:
        spread = f"--nnodes=1 --nproc-per-node={needed}"
    raise SpecError(
        f"torchrun started {world_size} processes (WORLD_SIZE), but "
        f"Roles(trainers={roles.trainers}, servers={roles.servers}) needs {needed}: 1 master, "
        f"{roles.servers} ps and {roles.trainers} trainer. The --nproc-per-node of all hosts must "
        f"add up to {needed}; for instance: torchrun {spread} train.py"
    )


def take_seats(
    pins: Sequence[str], hosts: Sequence[str], nodes: Sequence[int], roles: Roles
) -> list[Seat]:
    """Everyone's seat, in the order of torchrun's ranks.

    A process whose host pins a role gets it. The others fill what is left in the order of their
    ranks: the master, the servers, the trainers.

    Args:
        pins: each process's ``HYBRIDPAR_ROLE``; empty for none.
        hosts: the name of each one's host.
        nodes: the number of each one's torchrun.
        roles: the job's roles; as many as there are processes.

    Raises:
        SpecError: if more processes are pinned to a role than there are.

    Example:
        >>> seats = take_seats(["", "", "ps"], ["a", "a", "b"], [0, 0, 1], Roles(trainers=1))
        >>> [seat.name for seat in seats]
        ['master', 'trainer0', 'ps0']
    """
    free: dict[Role, int] = {"master": 1, "ps": roles.servers, "trainer": roles.trainers}
    for role, places in free.items():
        pinned = [host for host, pin in zip(hosts, pins, strict=True) if pin == role]
        if len(pinned) > places:
            raise SpecError(
                f"HYBRIDPAR_ROLE={role} is set for {len(pinned)} processes (on "
                f"{', '.join(sorted(set(pinned)))}), but the job has {places} of them. Raise the "
                "number in roles, or lower --nproc-per-node there."
            )
        free[role] = places - len(pinned)
    taken: dict[Role, int] = dict.fromkeys(free, 0)
    local: dict[tuple[int, Role], int] = {}
    seats = []
    for pin, host, node in zip(pins, hosts, nodes, strict=True):
        role = next(role for role, places in free.items() if pin == role or (not pin and places))
        free[role] -= not pin
        seats.append(Seat(role, taken[role], host, local.get((node, role), 0)))
        taken[role] += 1
        local[node, role] = seats[-1].local_rank + 1
    return seats
