"""The doctor's look at a machine: what it says when something is wrong, and when nothing is."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridpar import cli
from hybridpar.checkup import network, system
from hybridpar.checkup import world as world_module
from hybridpar.checkup.finding import Finding


def test_a_check_that_fails_is_told_how_to_mend_and_is_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYBRIDPAR_INTERFACE", "nope0")
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "[fail] interfaces: lo 127.0.0.1" in out
    assert "HYBRIDPAR_INTERFACE names the interface 'nope0'" in out
    assert f"torch {torch.__version__}" in out
    for what in ("ports", "/dev/shm", "open files", "processes and threads", "memory", "cores"):
        assert f"] {what}: " in out
    assert "[  ok] a world of 2 trainers and 1 servers trains: " in out


@pytest.mark.parametrize("found", ["ok", "warn"])
def test_warnings_are_no_failure(
    found: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hybridpar.cli.doctor.world", lambda: Finding(found, "a world", ""))
    assert cli.main(["doctor"]) == 0
    assert cli.main(["doctor", "--jobs"]) == 0
    assert capsys.readouterr().out.count("a world") == 1


def test_a_world_that_cannot_train_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    finding = world_module.world(0.1)
    assert finding.state == "fail"
    assert "does not train: trainer" in finding.what
    assert finding.mend


def limits(monkeypatch: pytest.MonkeyPatch, **values: int) -> None:
    given = {getattr(resource, f"RLIMIT_{name}"): value for name, value in values.items()}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (given[which], 4096))


Break = Callable[[pytest.MonkeyPatch, Path], object]
BROKEN: list[tuple[str, Callable[[], Finding], Break, str, str]] = [
    (
        "no gloo", system.versions,
        lambda patch, _: patch.setattr(torch.distributed, "is_gloo_available", lambda: False),
        "fail", "Install a torch built with gloo",
    ),
    (
        "old torch", system.versions,
        lambda patch, _: patch.setattr(torch, "__version__", "2.5.1"),
        "fail", "needs torch 2.6",
    ),
    (
        "small shm", system.shm,
        lambda patch, _: patch.setattr(
            os, "statvfs", lambda _: SimpleNamespace(f_blocks=16, f_bavail=8, f_frsize=1 << 20)
        ),
        "warn", "--shm-size",
    ),
    (
        "no memfd", system.shared_memory,
        lambda patch, _: patch.delattr(os, "memfd_create"),
        "warn", "Linux 3.17",
    ),
    (
        "no /proc", system.shared_memory,
        lambda patch, _: patch.setattr(system, "attach", lambda _: None),
        "warn", "hidepid",
    ),
    ("few files", system.open_files, lambda p, _: limits(p, NOFILE=200), "fail", "ulimit -n 1024"),
    ("some files", system.open_files, lambda p, _: limits(p, NOFILE=900), "warn", "ulimit -n"),
    ("few processes", system.processes, lambda p, _: limits(p, NPROC=50), "warn", "ulimit -u"),
    (
        "little memory", system.memory,
        lambda patch, _: patch.setattr(system, "available_bytes", lambda: 1 << 28),
        "warn", "End others",
    ),
    (
        "memory unknown", system.memory,
        lambda patch, _: patch.setattr(system, "available_bytes", lambda: None),
        "warn", "not checked",
    ),
    (
        "a quota", system.cores,
        lambda patch, _: [
            patch.delenv("OMP_NUM_THREADS", raising=False),
            patch.setattr(system, "cpu_quota", lambda: 0.5),
        ],
        "warn", "OMP_NUM_THREADS=1",
    ),
    (
        "no loopback", network.ports,
        lambda patch, _: patch.setattr(socket, "create_connection", _refused),
        "fail", "ip link set lo up",
    ),
    (
        "few ports", network.ports,
        lambda patch, folder: [
            (folder / "range").write_text("40000 40500\n"),
            patch.setattr(network, "_RANGE", folder / "range"),
        ],
        "warn", "ip_local_port_range",
    ),
    (
        "no name", network.host_name,
        lambda patch, _: patch.setattr(socket, "gethostbyname", _refused),
        "warn", "/etc/hosts",
    ),
    (
        "a loopback name", network.host_name,
        lambda patch, _: [
            patch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1"),
            patch.setattr(network, "interfaces", lambda: {"lo": "127.0.0.1", "e": "10.0.0.1"}),
        ],
        "warn", "--local-addr",
    ),
    (
        "a master on the loopback", lambda: network.chosen_interface("127.0.0.1"),
        lambda *_: None,
        "fail", "the loopback, which the other",
    ),
]  # fmt: skip


def _refused(*_: object, **__: object) -> Any:
    raise OSError("refused")


@pytest.mark.parametrize(
    ("check", "break_it", "state", "mend"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN]
)
def test_what_is_wrong_is_found(
    check: Callable[[], Finding], break_it: Break, state: str, mend: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    break_it(monkeypatch, tmp_path)
    finding = check()
    assert finding.state == state
    assert mend in finding.mend
    assert finding.lines().startswith(f"[{state}] ")


def test_a_quota_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cpu.max"
    path.write_text("150000 100000\n")
    assert system.cpu_quota(path) == 1.5
    path.write_text("max 100000\n")
    assert system.cpu_quota(path) is None
