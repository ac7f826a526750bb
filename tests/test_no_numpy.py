"""hybridpar needs no NumPy: it trains and evaluates where NumPy cannot be imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "evaluation.md").read_text()
EVALUATES = re.search(r"^```python\n(# evaluates\.py\n.*?)^```", PAGE, re.S | re.M)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["demo", "evaluates"])
def test_it_runs_without_numpy(what: str, tmp_path: Path) -> None:
    assert EVALUATES is not None
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['numpy'] = None\n")
    (tmp_path / "evaluates.py").write_text(EVALUATES[1])
    path = os.pathsep.join([str(tmp_path), *sys.path])
    demo = "from hybridpar.cli import main; raise SystemExit(main(['demo', '--epochs', '2']))"
    command = {"demo": ["-c", demo], "evaluates": ["evaluates.py"]}[what]
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
