"""Which sparse setting and which of torch's optimizers take each other's place, for messages."""

from __future__ import annotations

import torch

from hybridpar import optim


def sparse_name(given: object) -> str:
    """Which setting takes the place of a dense optimizer, given as a class or an instance."""
    kind = given if isinstance(given, type) else type(given)
    name = kind.__name__.removeprefix("Sparse")
    return name if name in optim.__all__ else "Adagrad"


def dense_name(given: object) -> str:
    """Which of torch's optimizers takes the place of a setting, given as a class or an instance."""
    kind = given if isinstance(given, type) else type(given)
    name = kind.__name__.removeprefix("RowWise")
    return name if hasattr(torch.optim, name) else "Adam"
