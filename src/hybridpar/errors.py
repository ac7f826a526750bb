"""Every exception that hybridpar raises.

HybridParError
├── SpecError            a spec, role count or setting is wrong (also a ValueError)
├── InputError           a batch, an id or an offset is wrong (also a ValueError)
├── TrainFunctionError   the train function cannot be sent to other processes (also a ValueError)
├── WaitTimeoutError     a wait reached its limit (also a TimeoutError)
├── PeerLostError        the process at the other end of a connection went away
│                        (also a ConnectionError)
├── CheckpointError      a checkpoint cannot be written, read or used
├── CallbackError        a callback of a loop raised
├── RemoteError          a call failed inside another process; carries its traceback
└── WorkerError          what `launch` raises: which process failed, where, and why

An error says what happened, where, and how to mend it.
"""

from __future__ import annotations

from typing import Any


def describe(error: BaseException) -> str:
    """An exception's type and message, even if it cannot say it."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - a __str__ that raises must not hide the exception
        return f"{type(error).__name__} (whose message cannot be shown)"


class HybridParError(Exception):
    """The root of hybridpar's exceptions: catch it to catch them all."""


class SpecError(HybridParError, ValueError):
    """A table spec, a role count or a setting cannot be used as given."""


class InputError(HybridParError, ValueError):
    """A batch was refused on the trainer, before anything left for a server."""


class TrainFunctionError(HybridParError, ValueError):
    """The train function, its arguments or its result cannot cross a process boundary."""


class WaitTimeoutError(HybridParError, TimeoutError):
    """A wait reached its limit; the message names who did not come."""


class PeerLostError(HybridParError, ConnectionError):
    """The process at the other end of a connection died or closed it."""


class CheckpointError(HybridParError):
    """A checkpoint cannot be written, is damaged, or does not fit the model."""


class CallbackError(HybridParError):
    """A callback of a loop raised; its own exception is the cause."""


class RemoteError(HybridParError):
    """A call failed inside another process.

    Attributes:
        origin: name of the process in which the exception was raised, such as ``"ps0"``.
        cause: the exception's type and message.
        remote_traceback: that process's traceback, as text.
    """

    def __init__(self, origin: str, cause: str, remote_traceback: str) -> None:
        super().__init__(f"{origin} failed: {cause}")
        self.origin = origin
        self.cause = cause
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteError, (self.origin, self.cause, self.remote_traceback)


class WorkerError(HybridParError):
    """One process of the job failed, and the whole job was ended because of it.

    Attributes:
        role: ``"trainer"``, ``"ps"`` or ``"master"``.
        rank: the process's rank within its role.
        host: the host it ran on.
        step: the training step that it was in, counted from 0, or that the job was in if it left no
            report; None if nobody had begun to train.
        cause: the exception's type and message, or how the process ended.
        remote_traceback: the process's traceback as text; empty if it left none.
        exitcode: as in :attr:`multiprocessing.Process.exitcode`, for a process that died without
            a report; else None.
        is_wait: whether all that is known is that it waited for another in vain.
    """

    def __init__(
        self,
        *,
        role: str,
        rank: int,
        host: str,
        step: int | None,
        cause: str,
        remote_traceback: str = "",
        exitcode: int | None = None,
        is_wait: bool = False,
    ) -> None:
        where = f"{role}{'' if role == 'master' else rank} (host {host}"
        where += ")" if step is None else f", step {step})"
        message = f"{where} {cause}"
        if remote_traceback:
            message += f"\n\nIts traceback:\n{remote_traceback.rstrip()}"
        super().__init__(message)
        self.role = role
        self.rank = rank
        self.host = host
        self.step = step
        self.cause = cause
        self.remote_traceback = remote_traceback
        self.exitcode = exitcode
        self.is_wait = is_wait

    def with_more(self, text: str) -> WorkerError:
        """The same error, with more to say of its cause."""
        return _worker_error(self.__dict__ | {"cause": f"{self.cause}\n{text}"})

    def __reduce__(self) -> tuple[Any, ...]:
        return _worker_error, (self.__dict__,)


def _worker_error(fields: dict[str, Any]) -> WorkerError:
    return WorkerError(**fields)
