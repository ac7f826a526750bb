"""Checks of versions, limits, memory and cores. Each tells what it found as a `Finding`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed

from hybridpar import __version__
from hybridpar.checkup.finding import Finding, State
from hybridpar.kernels import are_compiled
from hybridpar.server.memory import available_bytes
from hybridpar.shared_memory import attach, new_segment

_OLDEST_TORCH = (2, 6)
_SHM = Path("/dev/shm")
_LEAST_SHM = 64 << 20
_FEW_FILES, _SOME_FILES = 256, 1024
_FEW_PROCESSES = 64
_LEAST_MEMORY = 1 << 30


def versions() -> Finding:
    """Python, torch, hybridpar, gloo and NumPy."""
    parts = [
        f"hybridpar {__version__}",
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
        "NumPy " + (importlib.metadata.version("numpy") if _has("numpy") else "not installed"),
        f"CUDA devices {torch.cuda.device_count()}",
        "kernels " + ("compiled" if are_compiled() else "by torch"),
        platform.platform(),
    ]
    what = "versions: " + ", ".join(parts)
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return Finding("fail", f"{what}; torch has no gloo", "Install a torch built with gloo.")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST_TORCH:
        return Finding("fail", what, "hybridpar needs torch 2.6 or later: pip install -U torch.")
    return Finding("ok", f"{what}; gloo is there")


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def shm(path: Path = _SHM) -> Finding:
    """The size of /dev/shm, by which DataLoader's workers hand over their batches."""
    try:
        stats = os.statvfs(path)
    except OSError as error:
        return Finding(
            "warn", f"{path}: {error}", "DataLoader(num_workers=…) needs it: mount a tmpfs there."
        )
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    what = f"{path}: {free >> 20:,} of {size >> 20:,} MiB free"
    if free < _LEAST_SHM:
        return Finding(
            "warn", what,
            "DataLoader(num_workers=…) may run out of it: docker run --shm-size=1g, or in "
            "Kubernetes an emptyDir of medium Memory mounted there.",
        )  # fmt: skip
    return Finding("ok", what)


def shared_memory() -> Finding:
    """Anonymous shared memory (memfd), by which trainers read tables; and /proc to find it."""
    segment = new_segment(1)
    if segment is None:
        return Finding(
            "warn", "shared memory: the system has no memfd_create",
            "Everything will cross by socket, which is slower. Linux 3.17 or later has it.",
        )  # fmt: skip
    if attach(segment.handle) is None:
        return Finding(
            "warn", "shared memory: /proc/PID/fd cannot be opened",
            "Everything will cross by socket, which is slower. Mount /proc in the container, "
            "without hidepid.",
        )  # fmt: skip
    return Finding("ok", "shared memory: memfd works")


def open_files() -> Finding:
    """How many files and sockets a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state: State = "fail" if 0 <= soft < _FEW_FILES else "warn" if 0 <= soft < _SOME_FILES else "ok"
    mend = "" if state == "ok" else f"A server keeps one open a trainer: ulimit -n {_SOME_FILES}."
    return Finding(state, f"open files: {_limit(soft)} (at most {_limit(hard)})", mend)


def processes() -> Finding:
    """How many processes the user may have, and how many the control group."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    group = _number(Path("/sys/fs/cgroup/pids.max"))
    least = min((n for n in (soft, group) if n is not None and n >= 0), default=-1)
    what = f"processes and threads: {_limit(soft)} a user, {_limit(group)} in the control group"
    if 0 <= least < _FEW_PROCESSES:
        return Finding("warn", what, "A job has a thread a connection: ulimit -u, or pids.max.")
    return Finding("ok", what)


def locked_memory() -> Finding:
    """How much memory may be locked, which pinned memory of CUDA needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    what = f"locked memory: {_limit(soft)} bytes"
    if torch.cuda.is_available() and 0 <= soft < _LEAST_SHM:
        return Finding("warn", what, "Pinned memory may be refused: ulimit -l unlimited.")
    return Finding("ok", what)


def memory() -> Finding:
    """What this process may still take, of the machine and of its control groups."""
    left = available_bytes()
    if left is None:
        return Finding("warn", "memory: the system does not tell", "Tables are not checked for it.")
    what = f"memory: {left / (1 << 30):.1f} GiB left on the machine or in the control group"
    if left < _LEAST_MEMORY:
        return Finding("warn", what, "A process of torch alone takes about 0.3 GiB. End others.")
    return Finding("ok", what)


def cores() -> Finding:
    """Cores, the control group's quota of them, and torch's threads."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cpu_quota()
    threads = os.environ.get("OMP_NUM_THREADS")
    what = f"cores: {usable} usable"
    what += "" if quota is None else f", a quota of {quota:g} of them"
    what += f"; torch takes {torch.get_num_threads()} threads by itself, a job's processes "
    what += f"{threads} each (OMP_NUM_THREADS)" if threads else "share the cores"
    if quota is not None and usable is not None and quota < usable and not threads:
        return Finding(
            "warn", what,
            "Threads above the quota are stopped again and again: set OMP_NUM_THREADS=1.",
        )  # fmt: skip
    return Finding("ok", what)


def cpu_quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """How many cores the control group may use; None without a limit."""
    with suppress(OSError, ValueError):
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    return None


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):  # not there, or "max"
        return int(path.read_text())
    return None


def _limit(value: int | None) -> str:
    return "no limit" if value is None or value == resource.RLIM_INFINITY else f"{value:,}"
