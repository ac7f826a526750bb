"""How much memory a server may still take: what its machine has left, or its control group."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hybridpar.messages import Room

# For both versions of Linux's control groups: files of a group's limit and use, and in its
# memory.stat the part of the use that is cached files, which the kernel gives back when asked.
_VERSIONS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def room() -> Room:
    """This machine, and the memory that is left on it."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Room(f"{socket.gethostname()} {boot}", available_bytes())


def available_bytes(
    proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """The bytes that this process may still take; None where the system does not tell.

    Args:
        proc: where the kernel tells of processes.
        groups: where it tells of control groups.
    """
    found = list(_of_groups(proc, groups))
    with suppress(OSError, ValueError, KeyError):
        found.append(_fields(proc / "meminfo")["MemAvailable:"] * 1024)
    return max(0, min(found)) if found else None


def _of_groups(proc: Path, groups: Path) -> Iterator[int]:
    """What is left in each control group with a limit that this process is in."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = "memory" if "memory" in controllers.split(",") else controllers
        if version in _VERSIONS:
            limit, used, cached = _VERSIONS[version]
            below = Path(path.lstrip("/"))
            for group in (below, *below.parents):  # a parent's limit holds too
                folder = groups / version / group
                with suppress(OSError, ValueError):  # no such group here, or no limit: "max"
                    free = int((folder / limit).read_text()) - int((folder / used).read_text())
                    yield free + _fields(folder / "memory.stat").get(cached, 0)


def _fields(path: Path) -> dict[str, int]:
    """A file of lines of a name and a number."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
