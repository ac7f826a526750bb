"""Every complete program of the README and the docs runs, as a reader would run it."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import hybridpar
from warm_scripts import run_script

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def programs() -> list[object]:
    """Code blocks that begin with a comment that names a file, with those before on their page."""
    found = []
    for page in PAGES:
        blocks = re.findall(r"^```python\n(# \w+\.py\n.*?)^```", page.read_text(), re.S | re.M)
        for number, block in enumerate(blocks):
            name = f"{page.relative_to(ROOT)}:{block.split()[1]}"
            found.append(pytest.param(blocks[: number + 1], id=name))
    return found


@pytest.mark.parametrize("blocks", programs())
def test_programs_in_the_docs_run(blocks: list[str], tmp_path: Path) -> None:
    for block in blocks:
        script = tmp_path / block.split()[1]
        script.write_text(block)
    done = run_script(script, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    shows = "__main__" in blocks[-1]
    assert bool(done.stdout.strip()) == shows, "a program in the docs shows what it did"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_in_the_docs_parses(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M):
        compile(block, str(page), "exec")


@pytest.mark.parametrize(
    "module",
    [module.name for module in pkgutil.walk_packages(hybridpar.__path__, "hybridpar.")],
)
def test_examples_in_docstrings_run(module: str) -> None:
    loaded = importlib.import_module(module)
    results = doctest.testmod(loaded, extraglobs={"torch": importlib.import_module("torch")})
    assert results.failed == 0
