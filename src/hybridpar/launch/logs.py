"""Logs of a job's processes: a file each, every line with its time, level and role."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from hybridpar.errors import SpecError

LOG_DIRECTORY = "HYBRIDPAR_LOG_DIR"  # for `hybridpar run`, if launch got none

_logger = logging.getLogger("hybridpar")


class LogSettings(NamedTuple):
    """Where logs go.

    Attributes:
        directory: for the files.
        level: from which level on hybridpar's records are written.
    """

    directory: str
    level: int

    @classmethod
    def checked(cls, directory: object) -> LogSettings | None:
        """The settings for a folder, which is made; None for None, unless the environment has one.

        The level is that which the logger ``hybridpar`` has here, or INFO if it has none.

        Raises:
            SpecError: if it cannot be a folder for logs.
        """
        if directory is None:
            directory = os.environ.get(LOG_DIRECTORY) or None
        if directory is None:
            return None
        if not isinstance(directory, (str, os.PathLike)):
            raise SpecError(f"log_dir is {directory!r}. Give the path of a folder, or None.")
        path = Path(os.fsdecode(directory)).absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(f"log_dir {path} cannot be made: {error}.") from error
        return cls(str(path), _logger.level or logging.INFO)


@contextmanager
def logged(settings: LogSettings | None, name: str, attempt: int) -> Iterator[None]:
    """Within it, what this process logs and prints is also in its file, ``<name>.log``.

    That is what goes through ``sys.stdout`` and ``sys.stderr``; what a library writes to the file
    descriptors by itself is not. Each line is with the system as soon as it is whole, so a process
    that is killed leaves all of its lines. A restarted job adds to the files.
    """
    if settings is None:
        yield
        return
    file = _File(Path(settings.directory, f"{name}.log"), name, anew=attempt == 0)
    handler = _Handler(file)
    streams = sys.stdout, sys.stderr
    level = _logger.level
    sys.stdout = _Copied(streams[0], file, "stdout")
    sys.stderr = _Copied(streams[1], file, "stderr")
    _logger.addHandler(handler)
    _logger.setLevel(settings.level)
    _logger.info("%s is process %d, attempt %d", name, os.getpid(), attempt)
    try:
        yield
    finally:
        _logger.setLevel(level)
        _logger.removeHandler(handler)
        for copied in (sys.stdout, sys.stderr):
            if isinstance(copied, _Copied):
                copied.end_line()
        sys.stdout, sys.stderr = streams
        file.close()


class _File:
    """A log that several threads write, whole lines at a time."""

    def __init__(self, path: Path, name: str, *, anew: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if anew else 0)
        self._fd = os.open(path, flags, 0o644)
        self._name = name
        self._lock = threading.Lock()

    def write(self, level: str, text: str, when: float | None = None) -> None:
        """Write some lines of one level."""
        when = time.time() if when is None else when
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
        head = f"{clock}.{int(when % 1 * 1000):03d} {level:<8} {self._name}: "
        body = "".join(f"{head}{line}\n" for line in text.splitlines() or [""])
        with self._lock:
            if self._fd >= 0:
                os.write(self._fd, body.encode(errors="replace"))

    def close(self) -> None:
        """Write nothing more."""
        with self._lock:
            os.close(self._fd)
            self._fd = -1


class _Handler(logging.Handler):
    """Writes hybridpar's records, unless a handler of the user's prints them: then they come."""

    def __init__(self, file: _File) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        if not _is_printed(record):
            try:
                self._file.write(record.levelname, self.format(record), record.created)
            except Exception:  # noqa: BLE001 - as logging's own handlers do
                self.handleError(record)


def _is_printed(record: logging.LogRecord) -> bool:
    """Whether a handler of the root logger writes a record to one of our streams."""
    return _logger.propagate and any(
        isinstance(getattr(handler, "stream", None), _Copied) and record.levelno >= handler.level
        for handler in logging.getLogger().handlers
    )


class _Copied:
    """A text stream whose whole lines are written to a log, too.

    Of a line that is drawn over and over, as a progress bar's, the log has what it was at last.
    """

    def __init__(self, stream: TextIO, file: _File, level: str) -> None:
        self._stream = stream
        self._file = file
        self._level = level
        self._line = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        with self._lock:
            *lines, self._line = (self._line + text).split("\n")
            for line in lines:
                self._file.write(self._level, _last_drawn(line))
            self._line = _last_drawn(self._line, keep=True)
        return written

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def end_line(self) -> None:
        """Write what has no end yet."""
        with self._lock:
            line, self._line = self._line, ""
        if line.strip():
            self._file.write(self._level, _last_drawn(line))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)


def _last_drawn(line: str, *, keep: bool = False) -> str:
    """What stands in a line after the last carriage return before some text.

    Args:
        line: the line so far.
        keep: whether more may come: then a carriage return at its end is kept.
    """
    end = "\r" if keep and line.endswith("\r") else ""
    return line.rstrip("\r").rpartition("\r")[2] + end
