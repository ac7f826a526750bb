"""A process's signs of life to the master, and the news that come back; see `heartbeat`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from hybridpar.errors import PeerLostError, WaitTimeoutError, WorkerError
from hybridpar.launch.assignment import Report
from hybridpar.launch.heartbeat import WORD, AllDone, Beating
from hybridpar.launch.seats import Seat
from hybridpar.transport import Peer


class Pulse:
    """A process's own side: signs of life to the master, and the news from there.

    Args:
        me: this process.
        seats: every process of the job.
        address: where the master's `Lookout` listens.
        token: the job's secret.
        beating: period and limit of the signs of life.
        on_failure: called on a thread of the pulse when the job has failed.

    Raises:
        PeerLostError: if the master cannot be reached, or refuses the token.
    """

    def __init__(
        self,
        me: Seat,
        seats: Sequence[Seat],
        address: tuple[str, int],
        token: bytes,
        beating: Beating,
        on_failure: Callable[[WorkerError], None],
    ) -> None:
        self.master_is_lost = False
        self._me = me
        self._seats = seats
        self._beating = beating
        self._on_failure = on_failure
        limit_s = beating.limit_s
        self._beats = Peer("master", address, me=me.name, token=token, timeout_s=limit_s)
        # The verdict on a failure may take the limit, and the silence of the master ends the wait.
        self._word = Peer(
            "master", address, me=me.name + WORD, token=token, timeout_s=2 * limit_s + 1
        )
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def start(self) -> None:
        """Begin to give signs of life."""
        self._thread.start()

    def interrupt(self) -> None:
        """End a `finish` or `fail` that waits on another thread: it raises PeerLostError."""
        self._word.interrupt()

    def close(self) -> None:
        """Leave, after the end of the job."""
        self._word.close()

    def finish(self, result: bytes | None) -> list[bytes]:
        """Say that this process has done its part, and wait for all others, however long.

        The master goes on when this process has closed.

        Returns:
            Each trainer's pickled result, in rank order.

        Raises:
            WorkerError: if the job fails in the meantime.
            PeerLostError: if the master is gone.
        """
        news = self._word.send("finish", result or b"").wait(patiently=True)
        if isinstance(news, WorkerError):
            raise news
        assert isinstance(news, AllDone)
        self._thread.join()  # the same news ends it
        return news.results

    def fail(self, report: Report) -> WorkerError:
        """Report this process's failure; what comes back is the failure that came first.

        Raises:
            PeerLostError: if the master is gone.
            WaitTimeoutError: if it does not answer.
        """
        error = self._word.call("fail", report)
        assert isinstance(error, WorkerError)
        return error

    def _beat(self) -> None:
        news: object = None
        try:
            while news is None:
                news = self._beats.call("beat")
        except (PeerLostError, WaitTimeoutError) as error:
            self.master_is_lost = True
            news = self._master_lost(error)
        self._beats.close()
        if isinstance(news, WorkerError):
            self._on_failure(news)

    def _master_lost(self, error: Exception) -> WorkerError:
        master = next(seat for seat in self._seats if seat.role == "master")
        also = [str(s) for s in self._seats if s.host == master.host and s.role != "master"]
        if isinstance(error, WaitTimeoutError):
            cause = (
                f"gave {self._me} no sign of life for {self._beating.limit_s:g} s "
                "(heartbeat_limit_s): its host is down, it is stopped, or the link between the "
                f"two hosts is cut, perhaps that of {self._me.host}"
            )
        else:
            cause = f"was lost to {self._me}, which noticed the end of its connection: {error}"
        if master.host != self._me.host and also:
            cause += f". On the master's host there were also {', '.join(also)}"
        return WorkerError(role="master", rank=0, host=master.host, step=None, cause=cause)
