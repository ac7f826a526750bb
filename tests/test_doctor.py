"""Hangs: what is one and what is not, and who tells what everybody does."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import faulty
import hybridpar as hp
from hosts import wait_for
from hybridpar import waits
from hybridpar.launch import doctor
from warm_scripts import run_command

ROLES = hp.Roles(trainers=2, servers=2)


def test_a_stopped_trainer_is_named_with_the_step() -> None:
    launcher = hp.RoleLauncher(ROLES, heartbeat_s=0.2, heartbeat_limit_s=1.0)
    started = time.monotonic()
    with pytest.raises(hp.WorkerError, match=r"trainer1 .*step 3.*hangs: it has been stopped"):
        launcher.run(faulty.stop_in_step, (1, 3))
    assert time.monotonic() - started < 8


def test_a_slow_batch_is_no_failure() -> None:
    launcher = hp.RoleLauncher(ROLES, heartbeat_s=0.1, heartbeat_limit_s=0.5)
    assert launcher.run(faulty.slow_batch, (2.5,)) == [4, 4]


def test_a_job_is_restarted_as_often_as_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unbroken = hp.launch(faulty.fail_until, roles=ROLES, args=(0, str(tmp_path)))
    with caplog.at_level(logging.WARNING, "hybridpar"):
        results = hp.launch(faulty.fail_until, roles=ROLES, args=(2, str(tmp_path)), max_restarts=3)
    assert [attempt for attempt, _ in results] == [2, 2]
    assert [loss for _, loss in results] == [loss for _, loss in unbroken]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt0", "attempt1"]
    assert "restart 1 of 3, because trainer1" in caplog.text
    assert "restart 2 of 3, because trainer1" in caplog.text
    with pytest.raises(hp.WorkerError, match="SIGKILL"):
        hp.launch(faulty.fail_until, roles=ROLES, args=(2, str(tmp_path)), max_restarts=1)
    with pytest.raises(hp.SpecError, match="max_restarts is -1"):
        hp.launch(faulty.fail_until, roles=ROLES, max_restarts=-1)


SCRIPT = """
import sys
import hybridpar as hp
from faulty import wait_at
if __name__ == "__main__":
    roles = hp.Roles(trainers=2, servers=2)
    hp.RoleLauncher(roles, timeout_s=float(sys.argv[2])).run(wait_at, (sys.argv[1],))
"""


@contextmanager
def hanging_job(tmp_path: Path, timeout_s: float) -> Iterator[subprocess.Popen[str]]:
    """A script whose job waits for trainer 1."""
    (tmp_path / "script.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "script.py", str(tmp_path), str(timeout_s)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        stderr=subprocess.PIPE,
        text=True,
    ) as script:
        wait_for((tmp_path / "asleep").exists, "the hang")
        try:
            yield script
        finally:
            script.kill()


def check_stacks(report: str) -> None:
    """A report must tell which step a process is in, and where."""
    lines = {line.split()[0]: line for line in report.splitlines() if line.startswith("  ")}
    assert "step 3" in lines["trainer1"]
    assert "waits for no other process" in lines["trainer1"]
    stacks = report.partition("-- trainer1 --")[2]
    assert "in asleep_in_the_loss" in stacks
    assert "time.sleep(600)" in stacks


def test_the_doctor_command_tells_who_waits_for_whom(tmp_path: Path) -> None:
    with hanging_job(tmp_path, 600.0) as script:
        wait_for(lambda: doctor.jobs() == [script.pid], "its desk")

        def settled() -> bool:  # trainer 0 has sent its gradients by now
            return "to come to step 4" in doctor.ask(script.pid)

        wait_for(settled, "the others to wait")
        done = run_command("doctor", script.pid)
        check_stacks(done.stdout)
        assert re.search(
            r"ps\d \(process \d+\): waits for trainer1 to come to step 4 of epoch 1 since",
            done.stdout,
        )
        assert done.returncode == 0
        script.send_signal(signal.SIGUSR1)
        text = ""
        assert script.stderr is not None
        while "in asleep_in_the_loss" not in text:
            text += script.stderr.readline()
        alone = run_command("doctor", "--jobs")
        assert str(script.pid) in alone.stdout
    done = run_command("doctor", 1)
    assert done.returncode == 1
    assert re.search(r"No job 1 answers .* Running jobs: none", done.stderr)


def test_a_time_out_prints_the_report_and_then_the_cause(tmp_path: Path) -> None:
    with hanging_job(tmp_path, 4.0) as script:
        _, errors = script.communicate(timeout=60)
    check_stacks(errors)
    last = [line for line in errors.splitlines() if "WorkerError: " in line]
    assert len(last) == 1
    assert errors.index("hybridpar doctor") < errors.index(last[0])
    assert re.search(r"ps\d waited 4 s at step 4 of epoch 1 for trainer1, in vain", last[0])


def test_waits_are_told_while_they_last() -> None:
    with waits.waiting(lambda: "somebody"):
        with waits.waiting(lambda: "somebody else"):
            assert re.fullmatch(r"waits for somebody else since 0\.\d s", waits.waits()[0])
        assert "waits for somebody since" in waits.waits()[0]
    assert waits.waits() == []
