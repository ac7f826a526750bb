"""Which of several failing processes failed first: the one to name."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping

from hybridpar.errors import WorkerError
from hybridpar.launch.assignment import Assignment, Report

End = tuple[Assignment, Report | None, int | None]
"""How a process ended: what it was, its report if it made one, its exit code if it is gone."""


def choose_failure(
    ends: Mapping[str, End], assignments: Mapping[str, Assignment], step: int | None = None
) -> WorkerError | None:
    """The error to raise for processes that have ended; None if all ended well.

    A process that raised an exception of its own comes before one that died without a word, and
    both before one that only tells of losing another.

    Args:
        ends: the processes that have ended, by name, in the order in which they did.
        assignments: all processes of the job, by name.
        step: the step that the others were in, as far as they could tell.
    """
    own = [end for end in ends.values() if end[1] and end[1].cause and not end[1].consequence]
    silent = [end for end in ends.values() if end[1] is None]
    consequences = [end for end in ends.values() if end[1] and end[1].consequence]
    for assignment, report, exitcode in [*own, *silent, *consequences]:
        if report is None:
            steps = [end[1].step for end in consequences if end[1] and end[1].step is not None]
            return _died(assignment, exitcode, max(steps, default=step))
        origin = assignments.get(report.origin, assignment)
        return WorkerError(
            role=origin.role,
            rank=origin.rank,
            host=report.host,
            step=report.step,
            cause=report.cause,
            remote_traceback=report.remote_traceback,
            is_wait=report.waited,
        )
    return None


def _died(assignment: Assignment, exitcode: int | None, step: int | None) -> WorkerError:
    if exitcode is None:
        cause = (
            "hangs: it has been stopped, by SIGSTOP or a debugger, and the others wait for it. "
            "Debugging on purpose? Raise heartbeat_limit_s of the launcher."
        )
    elif exitcode < 0:
        cause = f"was killed by {signal.Signals(-exitcode).name}"
        if exitcode == -signal.SIGKILL:
            cause += " (by hand, or by the system because memory ran out)"
    else:
        cause = (
            f"ended with exit code {exitcode} before it could report. If it printed an error of "
            'its start above: is launch() called under if __name__ == "__main__"?'
        )
    return WorkerError(
        role=assignment.role,
        rank=assignment.rank,
        host=socket.gethostname(),
        step=step,
        cause=cause,
        exitcode=exitcode,
    )
