"""The harness: one warm forkserver for all worlds, and guards against what a test may leave."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
import torch._dynamo  # when first used it sets environment variables: not in a test, please


def _children() -> dict[int, str]:
    """This process's descendants, by id, the forkserver and resource tracker aside."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if stat.rpartition(") ")[2].split()[0] == "Z":
            continue
        parents[int(entry.name)] = int(stat.rpartition(") ")[2].split()[1]), command
    known, found = {os.getpid()}, {}
    grew = True
    while grew:
        grew = False
        for pid, (parent, command) in parents.items():
            if parent in known and pid not in known:
                known.add(pid)
                found[pid] = command
                grew = True
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return {
        pid: command
        for pid, command in found.items()
        if pid != server and "resource_tracker" not in command
    }


def pytest_configure() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _warm_forkserver() -> None:
    """Start the one forkserver here, with what the worlds of the tests import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "hybridpar",
            "torch._dynamo",
            "pytest",
            "worlds",
            "struck",
            "strict_warnings",
            "warm_scripts",
        ]
    )
    with pytest.MonkeyPatch.context() as patch:  # Python 3.11 does not tell it sys.path
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """Fail a test that leaves a process, a thread, an open file or an environment variable."""
    environment = dict(os.environ)
    threads = set(threading.enumerate())
    files = len(os.listdir("/proc/self/fd"))
    yield
    limit = time.monotonic() + 5.0
    while (left := _children()) and time.monotonic() < limit:
        time.sleep(0.05)  # a killed process may need a moment to vanish
    assert not left, f"processes left: {left}"
    assert not [t for t in set(threading.enumerate()) - threads if t.is_alive()]
    assert len(os.listdir("/proc/self/fd")) <= files + _FORKSERVER_FILES
    changed = {
        key
        for key in os.environ.keys() | environment.keys()
        if os.environ.get(key) != environment.get(key)
    }
    assert changed <= {"PYTEST_CURRENT_TEST"}, f"environment variables changed: {changed}"


_FORKSERVER_FILES = 4  # what the forkserver and the resource tracker keep open once started
