"""The train function on its way to the trainers, which import it by name."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hybridpar.errors import TrainFunctionError


def pickled_work(train: Callable[..., object], args: Sequence[object]) -> bytes:
    """The train function and its arguments, as they are sent.

    Raises:
        TrainFunctionError: if another process cannot import the function, or if this is such a
            process, which has come to the call of ``launch`` by importing the main module.
    """
    if not callable(train):
        raise TrainFunctionError(f"launch got train={train!r}. Give a function of the context.")
    name = getattr(train, "__qualname__", repr(train))
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise TrainFunctionError(
            f"launch('{name}') was called in a process of a job that is only starting, by its "
            'import of the main module. Call launch under if __name__ == "__main__":.'
        )
    try:
        work = pickle.dumps((train, tuple(args)))
    except Exception as error:
        raise TrainFunctionError(
            f"The train function '{name}' or its args cannot be sent to other processes: {error}. "
            "Define the function at the top of a module, not as a lambda or inside another "
            "function, and pass plain values or tensors as args."
        ) from error
    if b"__main__" in work and not _main_is_a_file():
        raise TrainFunctionError(
            f"The train function '{name}', or what its args are made of, is defined in a notebook "
            "or an interactive session, which other processes cannot import. Put it into a module "
            "(a .py file) and import it from there."
        )
    return work


def unpickled_work(name: str, work: bytes) -> tuple[Callable[..., object], tuple[Any, ...]]:
    """The train function and its arguments, in the trainer ``name``.

    Raises:
        TrainFunctionError: if they cannot be imported here.
    """
    try:
        train, args = pickle.loads(work)
    except Exception as error:
        raise TrainFunctionError(
            f"{name} cannot import the train function or what its args are made of: {error}. "
            "Define them at the top of a module that every process can import, outside of if "
            '__name__ == "__main__":.'
        ) from error
    return train, args


def _main_is_a_file() -> bool:
    """Whether multiprocessing can import the main module anew in another process."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    by_name = getattr(main, "__spec__", None) is not None
    return by_name or (path is not None and os.path.exists(path))
