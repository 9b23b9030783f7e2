"""What does the recorder of `trainfit watch` cost the training that it records?

The same training with and without it, in alternation in one process: blocks of steps, in pairs
whose order alternates, too. A figure is how much longer the median step of a block is with the
recorder (the median over the pairs: other work on the machine lengthens some steps of some
blocks), and the CPU time of the recorder's writing thread on top of that. Each block begins after
a while of the same: files are opened, libraries' threads counted, and Python has settled.

    5 ms, 100 ms   steps of a small network on one core, from a DataLoader without workers
    memory         growth of this process over 1,000,000 steps that only the recorder sees

    python bench/watch_overhead.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _bench import Figure, finish

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

import psutil  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from trainfit.results.watch.tables import STEPS as ROW  # noqa: E402
from trainfit.watch.recorder import process  # noqa: E402
from trainfit.watch.recorder.files.rank_files import RankFiles  # noqa: E402
from trainfit.watch.recorder.recorder import Place, Recorder  # noqa: E402

#: Seconds before a block, longer than until the recorder first writes.
SETTLE_S = 0.7
STEPS, QUICK_STEPS = 1_000_000, 100_000
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A training whose step takes about so long; ``most`` is the overhead that is allowed, in
    percent."""

    seconds: float
    width: int
    batch: int
    most: float
    block_s: float
    pairs: int


CASES = (Case(5e-3, 192, 56, 1.0, 0.8, 20), Case(0.1, 768, 104, 0.3, 2.0, 12))
#: Of ``--quick``.
FEWER = 4


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"a {FEWER}th of the pairs")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    figures, details = [], {}
    for case in CASES:
        found = overhead(case, case.pairs // (FEWER if options.quick else 1))
        name = f"recorder on a step of {case.seconds * 1e3:g} ms"
        figures.append(Figure(name, found["percent"], case.most, True, "%"))
        details[name] = found
    memory = growth(QUICK_STEPS if options.quick else STEPS)
    figures.append(Figure("memory growth of the recorder", memory["mib"], 8.0, True, " MiB"))
    details["memory"] = memory
    return finish(figures, options.json, details)


def training(case: Case) -> Callable[[], None]:
    """A function that makes one step, for as long as one likes."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(12):
        layers += [nn.Linear(case.width, case.width), nn.LayerNorm(case.width), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(case.width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(1024, case.width), torch.randint(0, 10, (1024,)))

    def batches() -> Any:
        while True:
            yield from DataLoader(data, batch_size=case.batch, shuffle=True)

    source = batches()

    def step() -> None:
        samples, labels = next(source)
        loss = nn.functional.cross_entropy(model(samples), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def overhead(case: Case, pairs: int) -> dict[str, Any]:
    """Percent that a step takes longer with the recorder: its hooks, and its writing thread."""
    step = training(case)
    _steps(step, 2 * SETTLE_S)
    ratios, writing = [], []
    medians: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs):
        for watched in (pair % 2 == 0, pair % 2 != 0):
            if watched:
                times, share = _watched_block(step, case.block_s)
                writing.append(share)
            else:
                _steps(step, SETTLE_S)
                times = _steps(step, case.block_s)
            medians[watched].append(statistics.median(times))
        ratios.append(medians[True][-1] / medians[False][-1])
    low, middle, high = statistics.quantiles(ratios, n=4)
    thread = statistics.median(writing)
    return {
        "percent": (middle - 1 + thread) * 100,
        "hooks_quartiles": [(low - 1) * 100, (high - 1) * 100],
        "writing_thread": thread * 100,
        "step_ms": statistics.median(medians[False]) * 1e3,
        "watched_step_ms": statistics.median(medians[True]) * 1e3,
        "pairs": pairs,
    }


def _steps(step: Callable[[], None], seconds: float) -> list[float]:
    """Seconds of each step, for so long."""
    found = []
    began = last = time.perf_counter()
    while last - began < seconds:
        step()
        now = time.perf_counter()
        found.append(now - last)
        last = now
    return found


def _watched_block(step: Callable[[], None], seconds: float) -> tuple[list[float], float]:
    """Seconds of each step, and the writing thread's CPU time as a share of the block's."""
    spent = 0.0
    write = RankFiles.write

    def timed(files: RankFiles) -> None:
        nonlocal spent
        began = time.thread_time()
        write(files)
        spent += time.thread_time() - began

    RankFiles.write = timed  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            process.begin(Place(Path(folder), time.time(), time.monotonic(), "bench"))
            count = len(_steps(step, SETTLE_S))
            spent = 0.0
            found = _steps(step, seconds)
            share = spent / sum(found)
            process.end()
            rows = (Path(folder) / "rank0.steps.bin").stat().st_size // ROW.itemsize
    finally:
        RankFiles.write = write  # type: ignore[method-assign]
    if rows != count + len(found):
        raise SystemExit(f"{count + len(found)} steps have {rows} rows: nothing was measured")
    return found, share


def growth(steps: int) -> dict[str, Any]:
    """Memory of this process after a tenth of the steps and at their end, in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Place(Path(folder), time.time(), time.monotonic(), "bench"))
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        loss = torch.zeros(())
        own = psutil.Process()
        first = 0
        began = time.perf_counter()
        for number in range(steps):
            if number == steps // 10:
                first = own.memory_info().rss
            _empty_step(recorder.steps, model, optimizer, loss)
        seconds = time.perf_counter() - began
        grown = own.memory_info().rss - first
        recorder.stop()
        lost = recorder.lost_rows
    return {
        "mib": grown / MIB,
        "steps": steps,
        "microseconds_of_a_step": seconds / steps * 1e6,
        "lost_rows": lost,
    }


def _empty_step(steps: Any, model: Any, optimizer: Any, loss: Any) -> None:
    """What the hooks tell in a step, without the step."""
    entered = steps.enter_root(model, (loss,))
    steps.leave_root(entered)
    steps.leave(steps.enter_backward(loss))
    steps.enter_optimizer(optimizer)
    steps.leave_optimizer(optimizer)


if __name__ == "__main__":
    sys.exit(main())
