"""What a process says of the exception that ended it, and whether that is another's fault."""

from __future__ import annotations

import socket
import traceback

from torch.distributed import DistError

from hybridpar.errors import PeerLostError, RemoteError, WaitTimeoutError, describe
from hybridpar.launch.assignment import Report


def report_of(name: str, error: BaseException, step: int | None) -> Report:
    """What a process says of an exception that ended it."""
    origin, cause, remote = name, f"raised {describe(error)}", ""
    if isinstance(error, RemoteError):
        origin, cause, remote = error.origin, f"raised {error.cause}", error.remote_traceback
    return Report(
        host=socket.gethostname(),
        step=step,
        cause=cause,
        remote_traceback=remote or _traceback_of(error),
        origin=origin,
        consequence=_is_consequence(error),
        waited=isinstance(error, WaitTimeoutError) or _is_gloo(error, "imed out"),
    )


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - its __str__ may raise
        return "".join(traceback.format_tb(error.__traceback__))


def _is_consequence(error: BaseException) -> bool:
    """Whether an exception, or one behind it, tells of another process's end."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, (PeerLostError, WaitTimeoutError, DistError)):
            return True
        if _is_gloo(current):
            return True
        current = current.__cause__ or current.__context__
    return False


def _is_gloo(error: BaseException, words: str = "") -> bool:
    """Whether gloo raised it: a plain RuntimeError that begins with its own source file's name."""
    text = describe(error) if isinstance(error, RuntimeError) else ""
    return "/gloo/" in text and words in text
