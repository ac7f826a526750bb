"""Jobs that torchrun starts: on this machine, and over network namespaces that stand for hosts."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import hybridpar as hp
import torchrun_job
from hosts import NAMES, PORT, Hosts, Torchrun, descendants, free_port, three_hosts, torchruns
from hosts import wait_for as wait_until

SOON_S = 12.0


def saved(folder: Path, num_ranks: int) -> list[list[object]]:
    """What launch returned in each process."""
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(num_ranks)]


def assert_equal(got: list[object], wanted: list[object]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert one.losses == pytest.approx(other.losses, abs=1e-6)
        for name, rows in other.rows.items():
            torch.testing.assert_close(one.rows[name], rows, atol=1e-6, rtol=1e-6)
        for name, value in other.dense.items():
            torch.testing.assert_close(one.dense[name], value, atol=1e-6, rtol=1e-6)


def one_machine(servers: int) -> list[object]:
    launcher = hp.RoleLauncher({"trainer": 2, "ps": servers}, share_memory=False)
    return launcher.run(torchrun_job.equal_to_one_machine, ("",))


# --- one machine ---------------------------------------------------------------------------------


def alone(folder: Path, what: str, num: int = 4, **changes: str) -> Torchrun:
    options = ("--standalone", f"--nproc-per-node={num}")
    return Torchrun(folder / "log", options, (what, str(folder)), **changes)


def test_torchrun_on_one_host_equals_plain_launch(tmp_path: Path) -> None:
    with torchruns([partial(alone, tmp_path, "equal_to_one_machine")]) as (run,):
        output = run.wait()
    assert run.process.returncode == 0, output
    wanted = one_machine(servers=1)
    for results in saved(tmp_path, 4):
        assert_equal(results, wanted)
    assert "terminate called" not in output


def test_one_host_listens_at_the_loopback_alone(tmp_path: Path) -> None:
    with torchruns([partial(alone, tmp_path, "listening")]) as (run,):
        output = run.wait()
    assert run.process.returncode == 0, output
    for results in saved(tmp_path, 4):
        assert set.union(*results) == {"0100007F"}, "127.0.0.1, as the kernel writes it"


def test_a_failure_under_torchrun_is_named_with_its_traceback(tmp_path: Path) -> None:
    with torchruns([partial(alone, tmp_path, "fail")]) as (run,):
        output = run.wait()
    assert run.process.returncode == 1
    host = socket.gethostname()
    assert f"WorkerError: trainer1 (host {host}, step 4) raised ZeroDivisionError" in output
    assert "in loss" in output
    assert "terminate called" not in output


@pytest.mark.slow
def test_a_long_computation_is_no_failure(tmp_path: Path) -> None:
    with torchruns([partial(alone, tmp_path, "compute_for_long", SECONDS="15")]) as (run,):
        output = run.wait()
    assert run.process.returncode == 0, output


def pair(folder: Path, what: str, *each: dict[str, str], nproc: tuple[int, int] = (2, 2), **more):
    """Two torchruns on this machine, which meet at the loopback."""
    port = free_port()
    return [
        partial(
            Torchrun,
            folder / f"log{node}",
            (
                "--nnodes=2",
                f"--node-rank={node}",
                f"--nproc-per-node={nproc[node]}",
                f"--master-addr={more.get('master', '127.0.0.1')}",
                f"--master-port={port}",
            ),
            (what, str(folder)),
            **({"HYBRIDPAR_INTERFACE": "lo"} | changes),
        )
        for node, changes in enumerate(each)
    ]


@pytest.mark.parametrize(
    ("each", "words"),
    [
        (
            ({}, {"SERVERS": "2"}),
            r"disagree on the roles: rank 0 \(host \S+\) has trainers=2, servers=1, "
            r"rank 2 \(host \S+\) has trainers=2, servers=2",
        ),
        (
            ({}, {"FAKE_VERSION": "9.9"}),
            r"disagree on hybridpar's version: rank 0 \(host \S+\) has \S+, rank 2 \(host \S+\) "
            r"has 9\.9",
        ),
        (
            ({}, {"WHAT": "fail"}),
            r"disagree on the train function: rank 0 \(host \S+\) has "
            r"__main__\.equal_to_one_machine, rank 2 \(host \S+\) has __main__\.fail",
        ),
        (
            ({"HYBRIDPAR_TOKEN": "a" * 32}, {"HYBRIDPAR_TOKEN": "b" * 32}),
            r"rank 2 \(host \S+\) does not have the same HYBRIDPAR_TOKEN as rank 0",
        ),
        (({}, {"HYBRIDPAR_TOKEN": "short"}), r"HYBRIDPAR_TOKEN has 5 characters"),
        (({}, {"HYBRIDPAR_ROLE": "servant"}), r"HYBRIDPAR_ROLE is 'servant'\. Set it to master"),
        (({}, {"HYBRIDPAR_ROLE": "ps"}), r"HYBRIDPAR_ROLE=ps is set for 2 processes"),
        (({}, {"HYBRIDPAR_INTERFACE": "eth77"}), r"interface 'eth77', but host \S+ has no such"),
    ],
    ids=["roles", "versions", "function", "tokens", "token", "role", "pins", "interface"],
)
@pytest.mark.slow
def test_what_does_not_fit_together_is_refused_on_every_host(
    each: tuple[dict[str, str], ...], words: str, tmp_path: Path
) -> None:
    with torchruns(pair(tmp_path, "equal_to_one_machine", *each)) as runs:
        outputs = [run.wait(30) for run in runs]
    for output in outputs:
        assert re.search(r"SpecError: .*" + words, output), output
    assert [run.process.returncode for run in runs] == [1, 1]


@pytest.mark.slow
def test_a_master_at_the_loopback_is_refused_with_several_hosts(tmp_path: Path) -> None:
    none = {"HYBRIDPAR_INTERFACE": ""}
    starts = pair(tmp_path, "equal_to_one_machine", none, none, master="localhost")
    with torchruns(starts) as runs:
        outputs = [run.wait(30) for run in runs]
    for output in outputs:
        assert re.search(
            r"SpecError: .*MASTER_ADDR 'localhost' is 127\.\S+ on host \S+: the loopback, which "
            r"the other 1 hosts of the job cannot reach",
            output,
        ), output


def test_too_few_processes_are_refused_with_the_number_needed(tmp_path: Path) -> None:
    with torchruns([partial(alone, tmp_path, "fail", 3)]) as (run,):
        output = run.wait(30)
    assert run.process.returncode == 1
    assert "SpecError: torchrun started 3 processes (WORLD_SIZE), but" in output
    assert "needs 4: 1 master, 1 ps and 2 trainer" in output
    assert "torchrun --nnodes=1 --nproc-per-node=4 train.py" in output


@pytest.mark.slow
def test_torchruns_own_restart_begins_afresh(tmp_path: Path) -> None:
    port = free_port()
    options = (
        "--nnodes=2",
        "--nproc-per-node=2",
        "--max-restarts=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--local-addr=127.0.0.1",
    )
    job = ("fail_once", str(tmp_path))
    starts = [
        partial(Torchrun, tmp_path / f"log{node}", options, job, HYBRIDPAR_INTERFACE="lo")
        for node in range(2)
    ]
    with torchruns(starts) as runs:
        outputs = [run.wait(90) for run in runs]
    assert [run.process.returncode for run in runs] == [0, 0], outputs
    assert (tmp_path / "failed").exists()
    assert saved(tmp_path, 4) == [["attempt 1"] * 2] * 4


def listeners(pid: int) -> list[int]:
    """Ports at which the processes below a torchrun listen."""
    ports = set()
    for child in descendants(pid):
        for fd in Path(f"/proc/{child}/fd").glob("*"):
            try:
                inode = re.findall(r"socket:\[(\d+)\]", str(fd.readlink()))
            except OSError:
                continue
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and [words[9]] == inode:
                    ports.add(int(words[1].split(":")[1], 16))
    return sorted(ports)


@pytest.mark.slow
def test_strangers_on_the_ports_stop_nobody(tmp_path: Path) -> None:
    token = {"HYBRIDPAR_TOKEN": "0123456789abcdef" * 2}
    with torchruns(pair(tmp_path, "train_until_told", token, token)) as runs:
        wait_until(lambda: len(list(tmp_path.glob("*.mark"))) == 2, "training", 60)
        ports = [port for run in runs for port in listeners(run.process.pid)]
        assert len(ports) >= 3, "the lookout, the master and the server"
        strangers = []
        for port in ports:
            for words in (b"", b"GET / HTTP/1.1\r\n\r\n" * 20):
                stranger = socket.create_connection(("127.0.0.1", port), 5)
                strangers.append(stranger)
                stranger.sendall(words)
        (tmp_path / "stop").touch()
        outputs = [run.wait(30) for run in runs]
        for stranger in strangers:
            stranger.close()
    assert [run.process.returncode for run in runs] == [0, 0], outputs
    assert len(saved(tmp_path, 4)) == 4


# --- three hosts ---------------------------------------------------------------------------------


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with three_hosts() as made:
        yield made


def spread(hosts: Hosts, folder: Path, what: str):
    """The master and a trainer on alpha, both servers on beta, a trainer on gamma."""
    roles = {"beta": {"HYBRIDPAR_ROLE": "ps"}, "gamma": {"HYBRIDPAR_ROLE": "trainer"}}
    return [
        partial(
            Torchrun,
            folder / f"{host}.log",
            (
                "--nnodes=3",
                f"--node-rank={node}",
                f"--nproc-per-node={1 if host == 'gamma' else 2}",
                "--master-addr=10.77.0.1",
                f"--master-port={PORT}",
            ),
            (what, str(folder)),
            prefix=hosts.prefix(host),
            SERVERS="2",
            **roles.get(host, {}),
        )
        for node, host in enumerate(NAMES)
    ]


@pytest.mark.slow
def test_three_hosts_train_as_one_machine_does(hosts: Hosts, tmp_path: Path) -> None:
    with torchruns(spread(hosts, tmp_path, "equal_to_one_machine")) as runs:
        outputs = [run.wait() for run in runs]
    assert [run.process.returncode for run in runs] == [0, 0, 0], outputs
    wanted = one_machine(servers=2)
    for results in saved(tmp_path, 5):
        assert_equal(results, wanted)
    for output, host, names in zip(
        outputs, NAMES, (("master", "trainer0"), ("ps0", "ps1"), ("trainer1",)), strict=True
    ):
        address = f"10.77.0.{NAMES.index(host) + 1} (eth0)"
        found = re.findall(r"(\w+) is process \d+ on host (\w+), at (.*)", output)
        assert sorted(found) == [(name, host, address) for name in names]


def wait_for_training(folder: Path) -> None:
    wait_until(lambda: len(list(folder.glob("*.mark"))) == 2, "training", 60)
    time.sleep(1.0)


def assert_all_ended(hosts: Hosts, *names: str) -> None:
    started = time.monotonic()
    for host in names:
        left = SOON_S - (time.monotonic() - started)
        wait_until(lambda host=host: not hosts.workers(host), f"the end of {host}", left)


@pytest.mark.slow
def test_a_cut_link_ends_the_job_on_every_host(hosts: Hosts, tmp_path: Path) -> None:
    with torchruns(spread(hosts, tmp_path, "train_until_told")) as runs:
        wait_for_training(tmp_path)
        hosts.cut("gamma")
        assert_all_ended(hosts, *NAMES)
        alpha, beta, gamma = (run.output for run in runs)
    for output in (alpha, beta):
        assert re.search(r"WorkerError: trainer1 \(host gamma.*gave no sign of life", output)
    assert re.search(r"WorkerError: master \(host alpha\) gave trainer1 \(host gamma\) no", gamma)


@pytest.mark.slow
def test_a_cut_link_to_the_master_is_named_as_that(hosts: Hosts, tmp_path: Path) -> None:
    with torchruns(spread(hosts, tmp_path, "train_until_told")) as runs:
        wait_for_training(tmp_path)
        hosts.cut("alpha")
        assert_all_ended(hosts, *NAMES)
        alpha, beta, gamma = (run.output for run in runs)
    for output in (beta, gamma):
        assert re.search(
            r"WorkerError: master \(host alpha\) gave .* no sign of life.*also trainer0 \(host a",
            output,
        )
    lost = re.findall(r"WorkerError: \w+ \(host (?:beta|gamma).*gave no sign of life.*", alpha)
    for name in ("ps0", "ps1", "trainer1"):
        assert name in lost[0]


@pytest.mark.slow
def test_a_killed_host_ends_the_job_on_the_others(hosts: Hosts, tmp_path: Path) -> None:
    with torchruns(spread(hosts, tmp_path, "train_until_told")) as runs:
        wait_for_training(tmp_path)
        hosts.kill("gamma")
        assert_all_ended(hosts, *NAMES)
        outputs = [run.output for run in runs[:2]]
    for output in outputs:
        assert re.search(r"WorkerError: trainer1 \(host gamma.*died without a word", output)


@pytest.mark.slow
def test_a_killed_host_of_the_master_ends_the_job(hosts: Hosts, tmp_path: Path) -> None:
    with torchruns(spread(hosts, tmp_path, "train_until_told")) as runs:
        wait_for_training(tmp_path)
        hosts.kill("alpha")
        assert_all_ended(hosts, *NAMES)
        outputs = [run.output for run in runs[1:]]
    for output in outputs:
        assert re.search(r"WorkerError: master \(host alpha\) was lost to .*trainer0", output)


@pytest.mark.slow
def test_an_outage_shorter_than_the_limit_only_slows_it(hosts: Hosts, tmp_path: Path) -> None:
    with torchruns(spread(hosts, tmp_path, "train_until_told")) as runs:
        wait_for_training(tmp_path)
        hosts.cut("gamma")
        time.sleep(1.5)
        hosts.mend("gamma")
        time.sleep(5.0)
        assert all(hosts.workers(host) for host in NAMES)
        (tmp_path / "stop").touch()
        outputs = [run.wait(30) for run in runs]
    assert [run.process.returncode for run in runs] == [0, 0, 0], outputs


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_slow_link_that_loses_packets_only_slows_it(hosts: Hosts, tmp_path: Path) -> None:
    for host in NAMES:
        hosts.slow_down(host)
    with torchruns(spread(hosts, tmp_path, "equal_to_one_machine")) as runs:
        outputs = [run.wait(150) for run in runs]
    assert [run.process.returncode for run in runs] == [0, 0, 0], outputs
    for results in saved(tmp_path, 5):
        assert_equal(results, one_machine(servers=2))
