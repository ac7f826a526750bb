"""A run's whole life: killed, resumed on other servers, evaluated, exported, scored elsewhere."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from example_runs import EXAMPLES, module, run, shared

EPOCHS = 2


def test_a_killed_run_goes_on_elsewhere_and_is_served(tmp_path: Path) -> None:
    data = shared("HYBRIDPAR_MOVIELENS", "ml-100k")
    command = [sys.executable, EXAMPLES / "movielens_served.py"]
    options = [str(data), str(tmp_path), "--epochs", str(EPOCHS)]
    saved = tmp_path / "checkpoints"
    with subprocess.Popen([*command, "train", *options, "--servers", "1"]) as job:
        limit = time.monotonic() + 60
        while not list(saved.glob("step-*[2468]0")):
            assert time.monotonic() < limit
            time.sleep(0.02)
        job.send_signal(signal.SIGKILL)
    done = 80_000 // module("movielens").BATCH_SIZE * EPOCHS
    assert max(path.name for path in saved.glob("step-*")) < f"step-{done:012}"
    resumed = run("movielens_served", "train", *options, "--servers", 2, "--trainers", 3)
    scored = subprocess.run(
        [*command, "score", *options], capture_output=True, text=True, timeout=60
    )
    assert scored.stdout == f"test AUC {resumed:.6f}\n", scored.stderr
    unbroken = run("movielens_served", "train", data, tmp_path / "unbroken", "--epochs", EPOCHS)
    assert resumed == pytest.approx(unbroken, abs=1e-4)
    assert resumed > 0.76
