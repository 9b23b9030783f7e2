"""Our memory prediction next to other tools', on the same measured cases.

The cases are those of memory_accuracy.py: timm models trained by timm's own script on an A100
40 GB in float32, measured by nvidia-smi (GPUMemNet's table). Models are taken at equal
distances in the sorted list. The tools, each by its own functions (`_peers.py`):

    trainfit     two simulated runs, every batch size by replay: reserved memory
    FakeTensor   naive: most bytes alive at once in two training steps under FakeTensorMode
    MemTracker   torch.distributed._tools.mem_tracker, second step; run at the least and the
                 largest batch size, a line between them (its peak is convex in the batch size)
    torchinfo    "Estimated Total Size"
    Accelerate   estimate-memory, "Training using Adam": knows no batch size
    vram-check   analyze(), SGD (left out, and said so, if it is not installed)

None of them knows the CUDA context. So each figure is compared twice: as the tool says it, and
with the same constant added that ours has (memory_accuracy.CONTEXT_MIB). A peer is judged by
the better of the two. Seconds are CPU time of one thread, a model's divided by its batch
sizes; imports, and making the model on the CPU for the peers, are not counted.

    python bench/memory_peers.py --data gpumemnet_timm_a100_fp32.csv [--quick] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import signal
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import _peers
from _bench import Figure, finish
from memory_accuracy import CONTEXT_MIB, chosen, import_timm, predict_timm, read_truth

MODELS, QUICK_MODELS = 24, 8
#: CPU seconds that a tool may take for one model; a child that hangs is ended after ten times that.
LIMIT_S, QUICK_LIMIT_S = 300.0, 60.0
HANGS = 10
BATCHES = range(8, 129)
MEDIAN_GOAL_PERCENT, RATIO_GOAL = 2.0, 2.0
UNDER_PERCENT = 2.0
OURS = "trainfit"


def ours(name: str, batches: dict[int, int]) -> dict[int, float]:
    rows = predict_timm(name, batches)
    if isinstance(rows, str):
        raise RuntimeError(rows)
    return {row.batch: row.reserved for row in rows}


TOOLS: dict[str, Callable[[str, dict[int, int]], dict[int, float]]] = {
    OURS: ours,
    "FakeTensor": lambda name, batches: _peers.fake_tensor(name, sorted(batches)),
    "MemTracker": lambda name, batches: _peers.mem_tracker(name, sorted(batches)),
    "torchinfo": lambda name, batches: _peers.torchinfo_total(name, sorted(batches)),
    "Accelerate": lambda name, batches: _peers.accelerate_estimate(name, sorted(batches)),
    "vram-check": lambda name, batches: _peers.vram_check(name, sorted(batches)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One tool's figure for one model at one batch size, MiB, without a context."""

    tool: str
    model: str
    batch: int
    measured: int
    figure: float
    seconds: float  # CPU time

    def error_percent(self, context_mib: float) -> float:
        return 100 * (self.figure + context_mib - self.measured) / self.measured


@dataclasses.dataclass(frozen=True)
class Score:
    """Errors of one tool over its cases, per cent."""

    median: float
    p90: float
    under: float

    @classmethod
    def of(cls, cases: list[Case], context_mib: float) -> Score:
        errors = [case.error_percent(context_mib) for case in cases]
        sizes = sorted(map(abs, errors))
        under = 100 * statistics.fmean(error < -UNDER_PERCENT for error in errors)
        return cls(statistics.median(sizes), sizes[int(0.9 * len(sizes))], under)


def main() -> int:
    options = parse()
    truth = {
        name: {batch: mib for batch, mib in rows.items() if batch in BATCHES}
        for name, rows in read_truth(options.data).items()
    }
    names = chosen(
        {name: rows for name, rows in truth.items() if rows},
        QUICK_MODELS if options.quick else options.limit,
    )
    limit = QUICK_LIMIT_S if options.quick else LIMIT_S
    cases: list[Case] = []
    problems: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        jobs = pool.map(lambda name: all_tools(name, truth[name], limit), names)
        for count, (found, failed) in enumerate(jobs, 1):
            cases += found
            problems += failed
            for line in (*failed, f"{count} of {len(names)} models done"):
                print(line, file=sys.stderr, flush=True)
    scores = summary(cases)
    if not options.json:
        print_table(scores, len({(case.model, case.batch) for case in cases}))
    details = {
        "scores": scores,
        "cases": [dataclasses.asdict(case) for case in cases],
        "problems": problems,
    }
    return finish(figures(cases, len(names)), options.json, details)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="GPUMemNet's table (CSV)")
    parser.add_argument("--limit", type=int, default=MODELS, help=f"number of models ({MODELS})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_MODELS} models")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    if not options.data.is_file():
        parser.error(f"{options.data}: no such file; it is published with GPUMemNet (see --help)")
    if options.limit < 1:
        parser.error("--limit: at least one model")
    return options


# Scores ------------------------------------------------------------------------------------------


def summary(cases: list[Case]) -> dict[str, dict[str, Any]]:
    """Scores by tool, as it says and with the context, and seconds a case."""
    rows: dict[str, dict[str, Any]] = {}
    for tool in TOOLS:
        if own := [case for case in cases if case.tool == tool]:
            rows[tool] = {
                "cases": len(own),
                "raw": dataclasses.asdict(Score.of(own, 0)),
                "with_context": dataclasses.asdict(Score.of(own, CONTEXT_MIB)),
                "seconds_per_case": statistics.fmean(case.seconds for case in own),
            }
    return rows


def figures(cases: list[Case], models: int) -> list[Figure]:
    """Ours, and how many times ours the best peer's median is, on the cases it answered."""
    own = [case for case in cases if case.tool == OURS]
    median = Score.of(own, CONTEXT_MIB).median if own else float("nan")
    ratios = []
    for tool in TOOLS:
        theirs = [case for case in cases if case.tool == tool]
        answered = {(case.model, case.batch) for case in theirs}
        same = [case for case in own if (case.model, case.batch) in answered]
        if tool != OURS and same:
            best = min(Score.of(theirs, 0).median, Score.of(theirs, CONTEXT_MIB).median)
            ratios.append(best / Score.of(same, CONTEXT_MIB).median)
    return [
        Figure("ours_median_error", median, MEDIAN_GOAL_PERCENT, True, "%"),
        Figure("best_peer_by_ours", min(ratios, default=float("nan")), RATIO_GOAL, False, "x"),
        Figure("models_predicted", len({case.model for case in own}), models, False),
    ]


def print_table(scores: dict[str, dict[str, Any]], count: int) -> None:
    print(
        f"{count} cases; |error| of the measured MiB: median, 90th percentile; share under by >2%"
    )
    print(f"{'':12}{'':>6}   {'as the tool says':^26}   {f'plus {CONTEXT_MIB:,} MiB context':^26}")
    heads = f"{'median':>9}{'p90':>8}{'under':>9}"
    print(f"{'tool':<12}{'cases':>6}   {heads}   {heads}{'CPU s/case':>12}")
    for tool, row in scores.items():
        cells = "   ".join(
            f"{row[way]['median']:>8.1f}%{row[way]['p90']:>7.1f}%{row[way]['under']:>8.0f}%"
            for way in ("raw", "with_context")
        )
        print(f"{tool:<12}{row['cases']:>6}   {cells}{row['seconds_per_case']:>12.2f}")


# Child processes ---------------------------------------------------------------------------------


def all_tools(name: str, measured: dict[int, int], limit_s: float) -> tuple[list[Case], list[str]]:
    """Every tool on one model in a child process, which a tool out of time ends."""
    cases: list[Case] = []
    problems: list[str] = []
    child = Child()
    try:
        for tool in TOOLS:
            answer = child.ask(tool, name, measured, limit_s)
            if isinstance(answer, str):
                problems.append(f"{name}: {tool}: {answer}")
                continue
            found, seconds = answer
            cases += [
                Case(tool, name, batch, mib, found[batch], seconds / len(measured))
                for batch, mib in measured.items()
            ]
    finally:
        child.end()
    return cases, problems


class Child:
    """A process that runs tools one after another; restarted after it was ended."""

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Any = None

    def ask(
        self, tool: str, name: str, measured: dict[int, int], limit_s: float
    ) -> tuple[dict[int, float], float] | str:
        """MiB by batch size and seconds, or why there are none."""
        if self._process is None:
            self._start(name)
        self._connection.send((tool, name, measured, limit_s))
        try:
            if self._connection.poll(HANGS * limit_s):
                answer: tuple[dict[int, float], float] | str = self._connection.recv()
                return answer
            problem = f"no answer within {HANGS * limit_s:g} s"
        except EOFError:
            problem = "its process ended"
        self.end()
        return problem

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None

    def _start(self, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name), daemon=True)
        self._process.start()
        theirs.close()
        self._connection.recv()  # imports are done and the model is made


def serve(connection: Any, name: str) -> None:
    """The child's loop: what is asked for, one after another."""
    import_timm()
    import accelerate  # noqa: F401
    import torch
    import torch.distributed._tools.mem_tracker
    import torchinfo  # noqa: F401

    torch.set_num_threads(1)
    _peers.without_data(name)
    connection.send(None)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        while True:
            connection.send(answer(*connection.recv()))


def answer(
    tool: str, name: str, measured: dict[int, int], limit_s: float
) -> tuple[dict[int, float], float] | str:
    """MiB by batch size and CPU seconds, or why there are none."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"over {limit_s:g} CPU seconds")

    # The time of the process, not of the clock: other work on the machine is not the tool's.
    signal.signal(signal.SIGPROF, stop)
    # Again every five seconds: an exception in a callback of the collector is dropped.
    signal.setitimer(signal.ITIMER_PROF, limit_s, 5)
    start = time.process_time()
    try:
        return TOOLS[tool](name, measured), time.process_time() - start
    except _peers.NotInstalledError as error:
        return f"left out: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:160]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    sys.exit(main())
