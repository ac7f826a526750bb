"""Where a process's random generators are, and how to put them back there."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """Where this process's random generators are: torch's, Python's, CUDA's, NumPy's if used."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if numpy := _numpy_random():
        name, keys, *rest = numpy.get_state()
        states["numpy"] = [name, keys.tolist(), *rest]
    return states


def rewind(states: Mapping[str, Any]) -> None:
    """Put this process's random generators where they were."""
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
    if "numpy" in states and (numpy := _numpy_random()):
        name, keys, *rest = states["numpy"]
        numpy.set_state((name, keys, *rest))


@contextmanager
def unmoved(device: torch.device) -> Iterator[None]:
    """After it, this process's random generators are where they were, that of a device too."""
    python = random.getstate()
    numpy = _numpy_random()
    state = None if numpy is None else numpy.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(state)


def _numpy_random() -> Any:
    """NumPy's generator, if NumPy is in use."""
    return getattr(sys.modules.get("numpy"), "random", None)
