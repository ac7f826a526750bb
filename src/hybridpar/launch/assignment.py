"""What the launcher tells a process when it starts, and what the process tells it at its end."""

from __future__ import annotations

from dataclasses import dataclass

from hybridpar.launch.logs import LogSettings
from hybridpar.launch.roles import Role, Roles, process_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What the launcher tells a process it starts.

    Attributes:
        role: the part it plays.
        rank: its rank within the role.
        local_rank: its rank among those of its role on its host, which gives it a device.
        roles: the whole job's roles.
        host: address that servers, the store and gloo bind.
        store_port: where the master's store listens.
        token: the job's secret, 32 bytes.
        timeout_s: longest wait for another process, in seconds.
        device: ``"cpu"`` or ``"cuda"``.
        num_threads: torch's threads in this process.
        attempt: how often the job has been restarted before.
        share_memory: whether trainers read the memory of servers on their machine.
        environment: the launcher's environment variables.
        work: for a trainer, the pickled (train function, arguments).
        logs: where its log goes, if it has one.
    """

    role: Role
    rank: int
    local_rank: int
    roles: Roles
    host: str
    store_port: int
    token: bytes
    timeout_s: float
    device: str
    num_threads: int
    attempt: int
    share_memory: bool
    environment: dict[str, str]
    work: bytes
    logs: LogSettings | None = None

    @property
    def name(self) -> str:
        """The process's name."""
        return process_name(self.role, self.rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """What a process does just now.

    Attributes:
        name: its name.
        pid: its process id.
        step: the training step it is in, if any.
        waits: what its threads wait for in other processes, a sentence each.
        stacks: the Python stack of each of its threads.
    """

    name: str
    pid: int
    step: int | None
    waits: list[str]
    stacks: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a process tells the launcher at its end, all of it text or bytes.

    Attributes:
        host: where it ran.
        step: the training step it was in, if any.
        result: the pickled result of a trainer; None otherwise.
        cause: empty if all went well; else what failed.
        remote_traceback: the traceback of the failure.
        origin: name of the process in which the failure began.
        consequence: whether the failure is likely another process's: a lost peer, or a wait in
            vain.
        waited: whether it is a wait in vain.
    """

    host: str
    step: int | None = None
    result: bytes | None = None
    cause: str = ""
    remote_traceback: str = ""
    origin: str = ""
    consequence: bool = False
    waited: bool = False
