"""Hosts for the tests: torchrun on this machine, or in network namespaces that stand for hosts.

A namespace has its own interfaces, addresses and name; a bridge in one more namespace joins them.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "torchrun_job.py"
NAMES = ("alpha", "beta", "gamma")
PORT = 29511


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], object], what: str, limit_s: float = 30.0) -> float:
    """Wait, and say how long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit_s, f"{what} did not happen within {limit_s} s"
        time.sleep(0.02)
    return time.monotonic() - started


def environment(**changes: str) -> dict[str, str]:
    paths = [str(JOB.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | changes


class Torchrun:
    """One host's torchrun of tests/torchrun_job.py; its output goes to a file."""

    def __init__(
        self,
        log: Path,
        options: Sequence[str],
        job: Sequence[str],
        *,
        prefix: Sequence[str] = (),
        **changes: str,
    ) -> None:
        self._log = log
        module = [sys.executable, "-m", "torch.distributed.run", *options]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*prefix, *module, str(JOB), *job],
                env=environment(**changes),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait(self, limit_s: float = 60.0) -> str:
        """Its output, once it has ended."""
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"torchrun did not end within {limit_s} s:\n{self.output[-4000:]}")
        return self.output

    def kill(self) -> None:
        for pid in [*descendants(self.process.pid), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


@contextmanager
def torchruns(starts: Sequence[Callable[[], Torchrun]]) -> Iterator[list[Torchrun]]:
    """Several at once; none is left when the block ends."""
    running: list[Torchrun] = []
    try:
        running.extend(start() for start in starts)
        yield running
    finally:
        for each in running:
            each.kill()


def ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if check and done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr}")
    return done.stdout


class Hosts:
    """Three network namespaces, 10.77.0.1 to 10.77.0.3, joined by a bridge in a fourth."""

    def __init__(self) -> None:
        self._prefix = f"hp{os.getpid()}"
        self._switch = f"{self._prefix}sw"
        self._made: list[str] = []

    def space(self, host: str) -> str:
        return f"{self._prefix}{host}"

    def make(self) -> None:
        self._add(self._switch)
        ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self._switch, "link", "set", "br0", "up")
        for number, host in enumerate(NAMES, start=1):
            space = self.space(host)
            self._add(space)
            pair = ("type", "veth", "peer", "name", "eth0", "netns", space)
            ip("-n", self._switch, "link", "add", host, *pair)
            ip("-n", self._switch, "link", "set", host, "master", "br0", "up")
            ip("-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def _add(self, space: str) -> None:
        ip("netns", "add", space)
        self._made.append(space)

    def prefix(self, host: str) -> list[str]:
        """What runs a command on the host."""
        named = ("unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh")
        return ["ip", "netns", "exec", self.space(host), *named]

    def cut(self, host: str) -> None:
        ip("-n", self._switch, "link", "set", host, "down")

    def mend(self, host: str) -> None:
        ip("-n", self._switch, "link", "set", host, "up")

    def slow_down(self, host: str) -> None:
        """Delay and lose what the host sends; skips the test where the kernel cannot."""
        rule = ("dev", "eth0", "root", "netem", "delay", "50ms", "loss", "5%")
        done = subprocess.run(
            ["tc", "-n", self.space(host), "qdisc", "add", *rule], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"this kernel has no netem: {done.stderr.strip()}")

    def pids(self, host: str) -> list[int]:
        return list(map(int, ip("netns", "pids", self.space(host), check=False).split()))

    def workers(self, host: str) -> list[int]:
        """The job's own processes on the host, torchrun aside."""
        found = []
        for pid in self.pids(host):
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text()
                if JOB.name in command and "torch.distributed.run" not in command:
                    found.append(pid)
        return found

    def kill(self, host: str) -> None:
        for pid in self.pids(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def unmake(self) -> None:
        for space in reversed(self._made):
            for pid in map(int, ip("netns", "pids", space, check=False).split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ip("netns", "del", space, check=False)


@contextmanager
def three_hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root, ip and unshare")
    hosts = Hosts()
    try:
        try:
            hosts.make()
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield hosts
    finally:
        hosts.unmake()
