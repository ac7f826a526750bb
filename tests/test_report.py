"""The HTML page on a run."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import hybridpar as hp
import watched
from hybridpar.cli import main
from hybridpar.report.charts import Line, line_chart, short
from hybridpar.report.collected import Collected
from hybridpar.report.page import page

HEADINGS = [
    "Curves", "Where the time of a step goes", "Rows touched and bytes moved, by server",
    "Staleness", "Plan", "Checkpoints", "Settings and versions",
]  # fmt: skip


class Reader(HTMLParser):
    """Collects what a page loads from elsewhere, its headings, and whether its tags match."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.headings: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href")
        ]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    return reader


def test_the_page_of_a_run_and_of_its_log_are_alike(tmp_path: Path, capsys) -> None:
    options = {"consistency": "bounded", "staleness": 2, "profile": True}
    hp.launch(
        watched.everything, roles=hp.Roles(trainers=2, servers=2), args=(str(tmp_path), options)
    )
    capsys.readouterr()
    html = (tmp_path / "run.html").read_text()
    reader = read(html)
    assert reader.loads == [], "nothing comes from elsewhere"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)
    assert reader.headings == HEADINGS
    for words in (
        "done after", "2 trainers on cpu", "2 servers", "bounded", "wait for servers", "ps1 update",
        "row-wise", "37 by 8", "SGD(lr=0.1)", "Table item", "auc", "Learning rate",
        hp.__version__,
    ):  # fmt: skip
        assert words in html, words
    assert main(["report", str(tmp_path / "run.jsonl"), "--title", "hybridpar run"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run.html'}\n"
    again = (tmp_path / "run.html").read_text()
    assert again == html


def test_the_page_of_a_killed_run(tmp_path: Path, capsys) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text("\n".join(json.dumps(entry) for entry in entries(3)) + '\n{"record": "st')
    assert main(["report", str(log), "-o", str(tmp_path / "other.html")]) == 0
    html = (tmp_path / "other.html").read_text()
    assert "not ended" in html
    plan = tmp_path / "plan.json"
    for text, message in (
        ("{", "no plan of hybridpar plan --json"), ("{}", "The plan is none"),
        ('{"trainers": 2, "servers": []}', "Make one with --trainers 1 --servers 0"),
    ):  # fmt: skip
        plan.write_text(text)
        assert main(["report", str(log), "--plan", str(plan)]) == 1
        assert message in capsys.readouterr().err
    assert read(html).headings == [HEADINGS[0], HEADINGS[1], HEADINGS[6]]


def entries(steps: int, first: int = 0) -> list[dict[str, object]]:
    start = {
        "record": "start", "format": 1, "rank": 0, "num_trainers": 1, "num_servers": 0,
        "step": first, "epochs": 1, "attempt": 0, "host": "<b>here</b>", "device": "cpu",
        "consistency": "sync", "tables": [], "servers": [], "settings": {"a": "<script>"},
        "versions": {}, "time": 0.0,
    }  # fmt: skip
    return [start] + [
        {"record": "step", "step": first + n + 1, "time": float(n), "loss": None if n == 1 else 1.0,
         "steps": 1, "samples_of_all": 4, "seconds": 0.5, "waiting": 0.1, "metrics": {}}
        for n in range(steps)
    ]  # fmt: skip


def test_text_of_a_log_is_no_markup() -> None:
    run = Collected()
    for entry in entries(2):
        run.add(entry)
    html = page(run, "<title>")
    read(html)
    assert "<script>" in html
    assert html.count("<script>") == 1
    assert "&lt;b&gt;here" in html
    assert "&lt;title&gt;" in html


def test_what_was_done_again_counts_once_and_long_runs_are_thinned_out() -> None:
    run = Collected()
    for entry in entries(10) + entries(10, first=5):
        run.add(entry)
    assert [point.step for point in run.points] == list(range(1, 16))
    long = Collected()
    for entry in entries(5000):
        long.add(entry)
    assert len(long.points) <= 801
    assert sum(point.steps for point in long.points) == 5000
    assert sum(point.num_losses for point in long.points) == 4999, "a loss that is not finite"
    assert long.points[-1].step == 5000
    assert long.samples_per_second == pytest.approx(8)
    assert long.waiting / long.step_seconds == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense\n", "line 1: no JSON"),
        ("{}\n", "cannot be read as a log of callbacks.JSONL: KeyError"),
        ("", "no start of a run"),
        ('{"record": "start", "format": 99, "step": 0}\n', "format 99"),
    ],
)
def test_logs_that_are_none(text: str, message: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "run.jsonl").write_text(text)
    assert main(["report", str(tmp_path / "run.jsonl")]) == 1
    assert message in capsys.readouterr().err
    assert main(["report", str(tmp_path / "missing.jsonl")]) == 1
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize(
    "points",
    [[], [(1.0, 0.0)], [(1.0, 2.0)], [(1.0, -1e-9), (2.0, 1e12)], [(5.0, 3.0), (5.0, 3.0)]],
)
def test_charts_of_odd_curves(points: list[tuple[float, float]]) -> None:
    chart = line_chart("odd", [Line("one", points)])
    assert bool(chart) == bool(points)
    assert "nan" not in chart
    read(chart)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (0.00051, "5.1e-4"), (0.25, "0.25"), (1234, "1,234"), (56789, "56.8k"), (3e9, "3G")],
)
def test_short_numbers(number: float, text: str) -> None:
    assert short(number) == text
