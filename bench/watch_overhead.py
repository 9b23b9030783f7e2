"""What does the recorder of `trainfit watch` cost the training that it records?

The same training with and without it, in alternation in one process: blocks of steps, in pairs
whose order alternates, too. A figure is the median over the pairs of how much longer the block
with the recorder took; its threads and files are part of that.

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

from trainfit.watch.recorder import process  # noqa: E402
from trainfit.watch.recorder.recorder import Place, Recorder  # noqa: E402

#: Pairs of blocks, and seconds of a block.
PAIRS, QUICK_PAIRS, BLOCK_S = 60, 8, 0.6
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


CASES = (Case(5e-3, 192, 64, 1.0, BLOCK_S), Case(0.1, 768, 256, 0.3, 3 * BLOCK_S))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_PAIRS} pairs of blocks")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    figures, details = [], {}
    for case in CASES:
        pairs = QUICK_PAIRS if options.quick else PAIRS
        found = overhead(case, pairs if case.seconds < 0.05 else max(6, pairs // 3))
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
    """Percent that a block takes longer with the recorder: median of the pairs, and quartiles."""
    step = training(case)
    for _ in range(20):
        step()
    alone = _block(step, 20) / 20
    steps = max(5, round(case.block_s / alone))
    ratios, lost = [], 0
    for pair in range(pairs):
        taken = {}
        for watched in (pair % 2 == 0, pair % 2 != 0):
            if watched:
                taken[watched], lost = _watched_block(step, steps)
            else:
                taken[watched] = _block(step, steps)
        ratios.append(taken[True] / taken[False])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "percent": (middle - 1) * 100,
        "quartiles": [(low - 1) * 100, (high - 1) * 100],
        "step_ms": alone * 1e3,
        "steps_of_a_block": steps,
        "pairs": pairs,
        "lost_rows": lost,
    }


def _block(step: Callable[[], None], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - began


def _watched_block(step: Callable[[], None], count: int) -> tuple[float, int]:
    """Seconds, and rows that are missing. The first steps, in which files are opened and the
    model's operations counted, are a run's start and not its pace."""
    with tempfile.TemporaryDirectory() as folder:
        process.begin(Place(Path(folder), time.time(), time.monotonic(), "bench"))
        for _ in range(3):
            step()
        seconds = _block(step, count)
        process.end()
        rows = (Path(folder) / "rank0.steps.bin").stat().st_size
    from trainfit.results.watch.tables import STEPS as ROW

    return seconds, count + 3 - rows // ROW.itemsize


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
