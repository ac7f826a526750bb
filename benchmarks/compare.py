"""Compare hybridpar with the tutorial's pattern, plain torch, DDP alone and TorchRec.

    python benchmarks/compare.py                        # every case
    python benchmarks/compare.py --case large --json large.json
    python benchmarks/compare.py --plot docs/_static/benchmarks.svg

The sides of a case take turns (A B C A B C …), each in fresh processes of one torch thread, and are
compared round by round: a machine's mood changes, a ratio within a round much less. The tutorial's
side needs NumPy, as torch RPC does; TorchRec's needs torchrec; the plot needs matplotlib. A side
that cannot run is named and left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OURS = "hybridpar sync"


def sides_of(name: str, trainers: int) -> dict[str, str]:
    """For each side of a case, the call that runs it, as an expression."""
    sides = {
        OURS: f"hybridpar(case, {trainers}, 1, 'sync')",
        "hybridpar async": f"hybridpar(case, {trainers}, 1, 'async')",
    }
    if name.startswith("rows-"):
        sides["plain, one process"] = "plain(case, 1)"
        return sides
    if name == "adagrad":
        plain_sgd = f"hybridpar(CASES['large'], {trainers}, 1, 'sync')"
        sides["hybridpar sync, SGD"] = plain_sgd
    else:
        sides["tutorial"] = f"tutorial(case, {trainers})"
    sides["plain, one process"] = "plain(case, 1)"
    sides["plain, two at once"] = "plain(case, 2)"
    sides["ddp alone"] = f"ddp(case, {trainers})"
    # Replicated tables are reduced whole in every step: out of the question but for tiny ones.
    shardings = ("table_wise", "row_wise") + (("data_parallel",) if name == "tutorial" else ())
    for sharding in shardings:
        sides[f"torchrec {sharding}"] = f"torchrec(case, {trainers}, '{sharding}')"
    return sides


def layouts() -> dict[str, dict[str, str]]:
    """The case "servers": other numbers of servers and trainers."""
    found = {}
    for name in ("large-zipf", "tables"):
        found[f"{name} by servers"] = {
            (OURS if n == 1 else f"{n} servers"): f"hybridpar(CASES['{name}'], 2, {n}, 'sync')"
            for n in (1, 2, 3)
        }
        found[f"{name} by trainers"] = {
            (OURS if n == 2 else f"{n} trainers"): f"hybridpar(CASES['{name}'], {n}, 1, 'sync')"
            for n in (2, 1, 3)
        }
    return found


def limits() -> str:
    """What is not a step's time: the start of a world, and memory."""
    lines = [
        "### start and memory",
        "",
        "| what | figures of each round |",
        "|---|---|",
    ]
    starts = [run_call("", "start()", 300) for _ in range(3)]
    lines.append(
        "| from `launch` to the first step's end, 2 trainers, 1 server, warm forkserver | "
        + ", ".join(f"{seconds:.2f} s" for seconds in starts)
        + " |"
    )
    for case in ("large", "adagrad", "rows-1e7"):
        held, server, trainer = run_call(case, "memory(case)", 600)
        lines.append(
            f"| {case}: a server's memory, table and state {held:.0f} MB | {server:.0f} MB; the "
            f"limit of 1.05 times that and 250 MB is {1.05 * held + 250:.0f} MB |"
        )
        lines.append(f"| {case}: a trainer's own memory after 50, 100, 300 steps | {trainer} MB |")
    return "\n".join(lines) + "\n"


def missing(side: str) -> str:
    """Why a side cannot run here; empty if it can."""
    needs = {"tutorial": "numpy", "torchrec": "torchrec"}
    module = needs.get(side.split()[0])
    if module and importlib.util.find_spec(module) is None:
        return f"needs {module}"
    return ""


def run_once(case: str, call: str, limit_s: float) -> float:
    """Median milliseconds a step of one side, run in processes of its own."""
    per_process = run_call(case, call, limit_s)
    return 1000 * max(statistics.median(times) for times in per_process)


def run_call(case: str, call: str, limit_s: float) -> Any:
    """What a call of `sides` returns, made in a fresh process, forked from one that has torch."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        process = context.Process(target=_answer, args=(case, call, str(out)))
        process.start()
        process.join(limit_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise RuntimeError(f"took more than {limit_s} s")
        answer = json.loads(out.read_text()) if out.exists() else {"error": "it died"}
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["value"]


def _answer(case: str, call: str, out: str) -> None:
    import sides
    from cases import CASES

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings of other libraries
    try:
        value = eval(call, vars(sides) | {"case": CASES.get(case)})
        answer = {"value": value}
    except Exception as error:  # noqa: BLE001 - the side is left out, saying why
        answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    Path(out).write_text(json.dumps(answer))
    os._exit(0)  # whatever a side has left behind


def warm_up() -> None:
    """Have the processes that run the sides forked from one that has loaded what they need."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {
        "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(paths),
    }  # fmt: skip
    multiprocessing.get_context("forkserver").set_forkserver_preload(["sides"])


def compare(case: str, sides: dict[str, str], rounds: int) -> dict[str, list[float]]:
    """For each side that runs, its median milliseconds a step in every round."""
    results: dict[str, list[float]] = {}
    left_out: set[str] = set()
    for side in sides:
        if why := missing(side):
            print(f"  {side}: left out, {why}")
            left_out.add(side)
    for number in range(rounds):
        for side, call in sides.items():
            if side in left_out:
                continue
            try:
                value = run_once(case, call, 600)
            except RuntimeError as error:
                print(f"  {side}: left out, {error}")
                left_out.add(side)
                continue
            results.setdefault(side, []).append(value)
            print(f"  round {number + 1}, {side}: {value:.2f} ms", file=sys.stderr)
    return results


def table(case: str, results: dict[str, list[float]]) -> str:
    """A Markdown table: median, spread, and the ratio to ours round by round."""
    ours = results[OURS]
    lines = [
        f"### {case}",
        "",
        "| side | ms a step | spread | times ours | round by round |",
        "|---|---|---|---|---|",
    ]
    for side, values in results.items():
        ratios = [value / own for value, own in zip(values, ours)]
        each = " ".join(f"{ratio:.2f}" for ratio in ratios)
        lines.append(
            f"| {side} | {statistics.median(values):.2f} | {min(values):.2f}–{max(values):.2f} | "
            f"{statistics.median(ratios):.2f} | {each} |"
        )
    return "\n".join(lines) + "\n"


def machine() -> str:
    """What the figures were measured on."""
    import torch

    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else ():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return (
        f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, one torch thread a process"
    )


def plot(everything: dict[str, dict[str, list[float]]], path: Path) -> None:
    """A bar a side, a panel a case."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install 'hybridpar[plots]'")
    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(everything), figsize=(8, 1.1 + 0.32 * sum(map(len, everything.values()))),
        gridspec_kw={"height_ratios": [len(results) for results in everything.values()]},
        squeeze=False,
    )  # fmt: skip
    for panel, (case, results) in zip(panels[:, 0], everything.items()):
        names = list(results)[::-1]
        medians = [statistics.median(results[name]) for name in names]
        colors = ["#2f6fde" if name.startswith("hybridpar") else "#9aa4b2" for name in names]
        bars = panel.barh(names, medians, color=colors)
        panel.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        panel.set_title(f"{case}: ms a step, less is better", fontsize=9, loc="left")
        panel.tick_params(labelsize=8)
        panel.margins(x=0.12)
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    sys.path.insert(0, str(HERE))
    from cases import CASES

    extra = layouts()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = [*CASES, *extra, "limits"]
    parser.add_argument("--case", action="append", choices=known, help="only this one")
    parser.add_argument("--side", action="append", help="only sides whose names begin so")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--plot", type=Path, help="draw them to this file (.svg or .png)")
    arguments = parser.parse_args()
    warm_up()
    print(machine(), "\n")
    everything: dict[str, dict[str, list[float]]] = {}
    for case in arguments.case or known:
        if case == "limits":
            print(limits(), flush=True)
            continue
        sides: dict[str, Any] = extra.get(case) or sides_of(case, arguments.trainers)
        if arguments.side:
            chosen = (OURS, *arguments.side)
            sides = {name: call for name, call in sides.items() if name.startswith(chosen)}
        everything[case] = compare(case, sides, arguments.rounds)
        print(table(case, everything[case]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "cases": everything}, indent=1))
    if arguments.plot:
        plot(everything, arguments.plot)


if __name__ == "__main__":
    main()
