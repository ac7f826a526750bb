"""Runs the programs of docs/examples inside the test's process: what launch starts is real."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
SHARED = Path(__file__).parents[2] / "shared" / "data"


def run(example: str, *options: object):
    """What the program's main returns, given these options."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        patch.setattr(sys, "argv", [f"{example}.py", *map(str, options)])
        return importlib.import_module(example).main()


def module(name: str):
    """A module of the examples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return importlib.import_module(name)


def shared(variable: str, name: str) -> Path:
    """Data that may not be shipped: where the variable says, or beside the checkout.

    The test that asks is skipped if there are none.
    """
    path = Path(os.environ.get(variable) or SHARED / name)
    if not path.exists():
        pytest.skip(f"no {path}; {variable} can name it")
    return path
