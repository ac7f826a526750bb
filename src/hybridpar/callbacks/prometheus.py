"""`Prometheus`: what a run does now, for Prometheus to scrape.

The text format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, NamedTuple

from typing_extensions import override

from hybridpar.callbacks.callback import Callback
from hybridpar.callbacks.logger import Interval
from hybridpar.callbacks.records import End, Evaluation, Failure, Run, Saved, Step
from hybridpar.callbacks.servers import ServerTraffic
from hybridpar.errors import SpecError

_logger = logging.getLogger("hybridpar")
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TRAFFIC = {
    "rows": "Rows that trainer 0 has looked up on a server.",
    "id_bytes": "Bytes of ids and offsets.",
    "row_bytes": "Bytes of rows that came from a server.",
    "gradient_bytes": "Bytes of gradients that went to a server.",
    "sent_bytes": "Bytes that crossed the socket to a server.",
    "received_bytes": "Bytes that crossed the socket from a server.",
    "waited_s": "Seconds in which trainer 0 waited for a server.",
}


class _Family(NamedTuple):
    """One metric of the text format, with all its samples."""

    name: str
    kind: str
    what: str
    samples: list[tuple[str, Mapping[str, object], float]]  # suffix, labels, value

    def text(self) -> str:
        full = f"hybridpar_{self.name}"
        lines = [f"# HELP {full} {self.what}", f"# TYPE {full} {self.kind}"]
        for suffix, labels, value in self.samples:
            inner = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
            lines.append(f"{full}{suffix}{f'{{{inner}}}' if inner else ''} {value:.17g}")
        return "\n".join(lines)


class Prometheus(Callback):
    """Serves ``http://host:port/metrics`` from trainer 0 while a fit runs.

    The counts go on in the next fit of the same loop.

    Args:
        port: where to listen; 0 takes a free port, and the same one in the next fit.
        host: the address to bind. Whoever reaches it can read the metrics.

    Attributes:
        url: where the metrics are, once a fit has begun; it is logged, too.

    Raises:
        SpecError: when a fit begins, if the port is taken.
    """

    on_every_trainer: ClassVar[bool] = False

    def __init__(self, port: int = 0, *, host: str = "127.0.0.1") -> None:
        if not isinstance(port, int) or not 0 <= port < 1 << 16:
            raise SpecError(f"Prometheus got port={port!r}. Give a port number, or 0 for any.")
        self._address = host, port
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self._counted = Interval()
        self._saved: Saved | None = None
        self._evaluation: Evaluation | None = None
        self.url = ""

    @override
    def on_start(self, run: Run) -> None:
        callback = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0  # of a client that says nothing

            def do_GET(self) -> None:
                callback._answer(self)

            def log_message(self, *args: object) -> None:  # a scrape is no news
                pass

        host, port = self._address
        try:
            self._server = ThreadingHTTPServer(self._address, Handler)
        except OSError as error:
            raise SpecError(
                f"Prometheus cannot listen at {host}:{port}: {error}. Give another port, or "
                "port=0 for a free one."
            ) from error
        self._server.daemon_threads = True
        self._address = host, self._server.server_address[1]
        self.url = f"http://{host}:{self._address[1]}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="prometheus", daemon=True
        )
        self._thread.start()
        _logger.info("metrics for Prometheus are at %s", self.url)

    @override
    def on_step(self, step: Step) -> None:
        dict(step.metrics)  # measured here: a scrape is answered in another thread
        self._counted.add(step)

    @override
    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation

    @override
    def on_checkpoint(self, checkpoint: Saved) -> None:
        self._saved = checkpoint

    @override
    def on_end(self, end: End) -> None:
        self._close()

    @override
    def on_failure(self, failure: Failure) -> None:
        self._close()

    def text(self) -> str:
        """What is served now."""
        return "\n".join(family.text() for family in self._families()) + "\n"

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        found = request.path.partition("?")[0] == "/metrics"
        body = (self.text() if found else "The metrics are at /metrics.\n").encode()
        request.send_response(200 if found else 404)
        request.send_header("Content-Type", _CONTENT_TYPE if found else "text/plain")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _close(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
        self._server = self._thread = None

    def _families(self) -> Iterator[_Family]:
        counted, step = self._counted, self._counted.last
        totals: dict[str, tuple[float, str]] = {
            "steps_total": (counted.steps, "Optimizer steps since the loop was built."),
            "skipped_steps_total": (counted.skipped, "Steps that all trainers left out."),
            "samples_total": (counted.samples, "Samples of trainer 0."),
            "step_seconds_total": (counted.seconds, "Seconds spent in steps."),
            "waiting_seconds_total": (counted.waiting, "Of them, seconds of waiting for servers."),
        }
        for name, (value, what) in totals.items():
            yield _Family(name, "counter", what, [("", {}, value)])
        if self._evaluation is not None:
            results = [("", {"name": n}, v) for n, v in self._evaluation.results.items()]
            yield _Family("evaluation", "gauge", "Results of the last evaluation.", list(results))
        if self._saved is not None:
            what = "Optimizer steps that the last checkpoint holds."
            yield _Family("checkpoint_step", "gauge", what, [("", {}, self._saved.step)])
        if step is not None:
            yield from _of_step(step)


def _of_step(step: Step) -> Iterator[_Family]:
    yield _Family("step", "gauge", "Optimizer steps done.", [("", {}, step.step)])
    yield _Family("epoch", "gauge", "The pass over the data, from 0.", [("", {}, step.epoch)])
    yield _Family("loss", "gauge", "Loss of trainer 0 in the last step.", [("", {}, step.loss)])
    metrics: list[Any] = [("", {"name": name}, v) for name, v in dict(step.metrics).items()]
    if metrics:
        yield _Family("metric", "gauge", "What callbacks measured of the last step.", metrics)
    servers: tuple[ServerTraffic, ...] = step.servers
    for name, what in _TRAFFIC.items():
        samples: list[Any] = [("", {"server": s.server}, asdict(s)[name]) for s in servers]
        if samples:
            full = "server_" + name.replace("waited_s", "waited_seconds") + "_total"
            yield _Family(full, "counter", what, samples)
    buckets = [bucket for table, counts in dict(step.staleness).items() for bucket in _histogram(
        table, dict(counts))]  # fmt: skip
    if buckets:
        what = "By how many steps the rows of a batch were behind."
        yield _Family("staleness_steps", "histogram", what, buckets)


def _histogram(
    table: str, counts: Mapping[int, int]
) -> list[tuple[str, Mapping[str, object], float]]:
    found: list[tuple[str, Mapping[str, object], float]] = []
    below = 0
    for behind in sorted(counts):
        below += counts[behind]
        found.append(("_bucket", {"table": table, "le": behind}, below))
    total = sum(behind * n for behind, n in counts.items())
    found.append(("_bucket", {"table": table, "le": "+Inf"}, below))
    return [*found, ("_sum", {"table": table}, total), ("_count", {"table": table}, below)]


def _escaped(text: object) -> str:
    return str(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
