"""`chosen`: a loop's callbacks, from those it was given and what else it was asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hybridpar.callbacks.callback import Callback
from hybridpar.callbacks.progress_bar import ProgressBar
from hybridpar.callbacks.report_page import Report
from hybridpar.errors import SpecError


def chosen(
    callbacks: Sequence[Callback], progress: bool | None, report: str | os.PathLike[str] | None
) -> list[Callback]:
    """The callbacks, with a progress bar and a report as asked.

    Raises:
        SpecError: if one is no callback, or a bar is asked for and tqdm is not installed.
    """
    _check(callbacks, progress, report)
    found = list(callbacks)
    if report is not None:
        found.append(Report(report))
    has_bar = any(isinstance(callback, ProgressBar) for callback in found)
    if not has_bar and (progress or (progress is None and sys.stderr.isatty())):
        found.append(ProgressBar(needs_tqdm=bool(progress)))
    return found


def _check(callbacks: object, progress: object, report: object) -> None:
    if not isinstance(callbacks, Sequence):
        raise SpecError(f"callbacks is {callbacks!r}. Give a list of callbacks.")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = " Make an object of it: add ()." if isinstance(callback, type) else ""
            raise SpecError(
                f"callbacks has {callback!r}, which is no hybridpar.callbacks.Callback.{hint}"
            )
    if progress not in (True, False, None):
        raise SpecError(f"progress is {progress!r}. Give True, False or None.")
    if report is not None and not isinstance(report, (str, os.PathLike)):
        raise SpecError(f"report is {report!r}. Give the path of the page, or None.")
