"""Failures of real processes: what the caller is told, and that nothing is left."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import faulty
import hybridpar as hp
from hosts import wait_for

SOON_S = 10.0


@pytest.mark.parametrize("victim", ["trainer0", "trainer1", "ps0", "ps1", "master"])
@pytest.mark.parametrize("train", [faulty.train_for_ever, faulty.train_with_workers_for_ever])
def test_a_killed_process_ends_the_job(
    victim: str, train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed_at: list[float] = []

    def kill() -> None:
        wait_for(lambda: len(list(tmp_path.iterdir())) == 2, "training")
        (line,) = [text for text in caplog.messages if text.startswith(f"{victim} ")]
        killed_at.append(time.monotonic())
        os.kill(int(re.findall(r"process (\d+)", line)[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with caplog.at_level(logging.INFO, "hybridpar"), pytest.raises(hp.WorkerError) as caught:
        hp.launch(train, roles=hp.Roles(trainers=2, servers=2), args=(str(tmp_path),))
    killer.join(SOON_S)
    assert time.monotonic() - killed_at[0] < SOON_S
    error = caught.value
    assert victim == error.role + ("" if error.role == "master" else str(error.rank))
    assert error.exitcode == -signal.SIGKILL
    assert "SIGKILL" in str(error)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", ["ZeroDivisionError: the data are bad", "in fail"]),
        ("unpicklable", ["TwoArgumentError: one and", "in fail"]),
        ("chained", ["RuntimeError: what came of it", "KeyError: 'the first cause'"]),
        ("exit", ["SystemExit: 3"]),
        ("os_exit", ["exit code 7"]),
        ("kill", ["SIGKILL"]),
    ],
)
def test_a_failing_trainer_is_named_with_step_and_traceback(how: str, words: list[str]) -> None:
    with pytest.raises(hp.WorkerError) as caught:
        hp.launch(faulty.fail_at, roles=hp.Roles(trainers=3, servers=2), args=(1, 4, how))
    error = caught.value
    assert (error.role, error.rank) == ("trainer", 1)
    for word in words:
        assert word in str(error)
    if error.exitcode is None:
        assert error.step == 4
        assert "step 4" in str(error)
    elif how == "kill":
        assert error.step == 4, "the others tell which step it was"


def test_a_failure_before_training_is_named() -> None:
    with pytest.raises(hp.WorkerError, match=r"trainer1 .*OSError: no such data"):
        hp.launch(faulty.fail_before_training, roles=hp.Roles(trainers=2))


def test_a_failing_server_is_named_with_its_own_traceback() -> None:
    with pytest.raises(hp.WorkerError, match=r"ps0 .*ArithmeticError: cannot fill") as caught:
        hp.launch(faulty.server_fails, roles=hp.Roles(trainers=2))
    assert caught.value.role == "ps"
    assert "in bad_init" in caught.value.remote_traceback


def test_trainers_with_different_models_are_told() -> None:
    with pytest.raises(hp.WorkerError, match="table 'item' has mode 'sum' against 'mean'"):
        hp.launch(faulty.different_specs, roles=hp.Roles(trainers=2))


def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(hp.WorkerError, match="returned a generator that cannot be pickled"):
        hp.launch(faulty.unpicklable_result, roles=hp.Roles(trainers=1))


@pytest.mark.parametrize("train", [lambda ctx: None, "train", None])
def test_a_train_function_that_cannot_be_sent(train) -> None:
    with pytest.raises(hp.TrainFunctionError):
        hp.launch(train, roles=hp.Roles(trainers=1))


def test_uneven_steps_by_hand_name_the_trainer_that_stopped() -> None:
    with pytest.raises(hp.WorkerError, match="trainer1 has finished its train function"):
        hp.launch(faulty.uneven_own_loop, roles=hp.Roles(trainers=2))


def test_a_wait_in_vain_names_who_is_missing() -> None:
    launcher = hp.RoleLauncher(hp.Roles(trainers=2), timeout_s=2.0)
    with pytest.raises(hp.WorkerError, match=r"ps0 waited 2 s .* for trainer1, in vain"):
        launcher.run(faulty.waits_in_vain)


SCRIPT = """
import logging, sys
import hybridpar as hp
from faulty import train_for_ever
if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    hp.launch(train_for_ever, roles=hp.Roles(trainers=2, servers=1), args=(sys.argv[1],))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ending_the_launcher_ends_everything(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    marks = tmp_path / "marks"
    marks.mkdir()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "script.py", str(marks)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as script:
        wait_for(lambda: len(list(marks.iterdir())) == 2, "training")
        script.send_signal(number)
        out, err = script.communicate(timeout=SOON_S)
    pids = [int(pid) for pid in re.findall(r"is process (\d+)", out)]
    assert len(pids) == 4
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end", SOON_S)
    if number == signal.SIGINT:
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert "WorkerError" not in err


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import hybridpar as hp\n"
        "def train(ctx): return 1\n"
        "hp.launch(train, roles=hp.Roles(trainers=1))\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert '__name__ == "__main__"' in done.stderr.rstrip().splitlines()[-1]
