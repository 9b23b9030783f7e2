"""The queueing model of the DataLoader alone, against a real one whose batches only sleep.

Nothing competes for the CPU then, so what is compared is the queues: tokens, turns, order,
workers, consumer. Each configuration runs a real DataLoader over the same sequence of batch
times as the simulation. What a hand-off and a sleep take beyond what is asked for is measured
once, in three runs with one worker; everything else is computed.

    python bench/loader_model.py [--quick] [--json]
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from _bench import BenchFigure, finish, parser, table
from torch.utils.data import DataLoader, Dataset

from helpers_costs import lognormal_costs
from trainfit.loader.measure.model import BatchCost, Load, Transfer, simulate
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.runs.measurement import Consumer

MEAN_S = 0.02
VARIATIONS = (0.0, 0.4, 1.0)


@dataclass(frozen=True)
class QueueCase:
    """One configuration: its settings, how uneven its batches are, and its step."""

    settings: LoaderSettings
    variation: float
    step_s: float

    @property
    def name(self) -> str:
        s = self.settings
        order = "in order" if s.in_order else "any order"
        return (
            f"{s.num_workers} workers x {s.prefetch_factor}, {order}, "
            f"CV {self.variation:g}, step {1e3 * self.step_s:.3g} ms"
        )


@dataclass(frozen=True)
class Overheads:
    """Seconds a batch beyond what is asked for: see :func:`overheads`."""

    worker_s: float
    receive_s: float
    step_s: float
    latency_s: float


class Sleeping(Dataset[torch.Tensor]):
    """Batches that take a given time each and hold next to nothing."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds[index])
        return torch.tensor(index)


def main() -> int:
    options = parser(__doc__, quick="fewer configurations").parse_args()
    torch.set_num_threads(1)
    extra = overheads()
    batches = 300 if options.quick else 500
    rows = []
    for case in cases(options.quick):
        costs = lognormal_costs(MEAN_S, case.variation, batches, seed=3)
        predicted = predict(case, [cost.wait_s for cost in costs], extra)
        measured = measure(case, [cost.wait_s for cost in costs])
        rows.append({"case": case.name, "measured": measured, "predicted": predicted})
    errors = [100 * abs(row["predicted"] / row["measured"] - 1) for row in rows]
    figures = [
        BenchFigure("sleeping_loader_median_error", statistics.median(errors), 2.0, True, "%"),
        BenchFigure(
            "sleeping_loader_p90_error", statistics.quantiles(errors, n=10)[-1], 8.0, True, "%"
        ),
    ]
    details = {"overheads": dataclasses.asdict(extra), "rows": rows}
    shown = table(("batches/s", "measured", "predicted"), (row.values() for row in rows))
    return finish(figures, options.json, details, [shown])


def cases(quick: bool) -> Iterator[QueueCase]:
    """Every combination; the step is as fast as the workers on average, or takes no time."""
    workers = (1, 4) if quick else (1, 2, 4, 8)
    prefetch = (1, 2) if quick else (1, 2, 6)
    for count, factor, in_order, variation, balanced in itertools.product(
        workers, prefetch, (True, False), VARIATIONS, (True, False)
    ):
        step_s = MEAN_S / count if balanced else 0.0
        yield QueueCase(LoaderSettings(count, factor, in_order=in_order), variation, step_s)


def predict(case: QueueCase, waits: Sequence[float], extra: Overheads) -> float:
    """Batches a second by the model."""
    load = Load(
        tuple(BatchCost(seconds + extra.worker_s, 0.0) for seconds in waits),
        Transfer(receive_s=extra.receive_s, latency_s=extra.latency_s),
        Consumer(case.step_s + extra.step_s if case.step_s else 0.0),
    )
    return simulate(load, case.settings, len(waits)).batches_per_s


def measure(case: QueueCase, waits: Sequence[float]) -> float:
    """Batches a second of a real DataLoader, counted as the model counts them."""
    settings = case.settings
    loader = DataLoader(
        Sleeping(waits),
        batch_size=None,
        num_workers=settings.num_workers,
        prefetch_factor=settings.prefetch_factor,
        in_order=settings.in_order,
    )
    warm = min(3 * settings.tokens, len(waits) // 2)
    handed: list[float] = []
    for _ in loader:
        handed.append(time.perf_counter())
        if case.step_s:
            time.sleep(case.step_s)
    return (len(handed) - 1 - warm) / (handed[-1] - handed[warm])


def overheads() -> Overheads:
    """Measured with one worker, in three runs that each wait for another part."""
    count, sleep_s = 150, 0.01
    # The worker is the slowest part: what it takes beyond its sleep.
    worker_s = 1 / measure(QueueCase(LoaderSettings(1, 8), 0.0, 0.0), [sleep_s] * count) - sleep_s
    # Batches are always there: what taking one takes, and a step beyond its sleep.
    receive_s, step_s = ready([0.001] * count, sleep_s)
    # One batch at a time: everything in turn.
    turn_s = 1 / measure(QueueCase(LoaderSettings(1, 1), 0.0, 0.0), [sleep_s] * count)
    latency_s = max(0.0, turn_s - sleep_s - worker_s - receive_s)
    return Overheads(worker_s, receive_s, step_s - sleep_s, latency_s)


def ready(waits: Sequence[float], step_s: float) -> tuple[float, float]:
    """Seconds of a ``next`` that need not wait for a batch, and of a step (medians)."""
    taken, slept = [], []
    iterator = iter(DataLoader(Sleeping(waits), None, num_workers=1, prefetch_factor=8))
    while True:
        began = time.perf_counter()
        if next(iterator, None) is None:
            break
        taken.append(time.perf_counter() - began)
        began = time.perf_counter()
        time.sleep(step_s)
        slept.append(time.perf_counter() - began)
    return statistics.median(taken[10:]), statistics.median(slept[10:])


if __name__ == "__main__":
    sys.exit(main())
