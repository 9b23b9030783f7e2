"""Simulated against measured GPU memory, on the cases of the truth campaign (bench/gpu).

For every truth file: the same job on the simulated GPU of that name, its peaks next to the
measured ones; the recorded history of the allocator replayed through our model of it; for
limits, the largest batch from two simulated ones next to the one that ran. Files are what
`python bench/gpu/campaign.py` writes on a machine with an NVIDIA GPU; see bench/gpu/README.md.

    python bench/memory_truth.py [--truth DIR] [--only PATTERN] [--quick] [--json]

Exit status: 0 if every goal holds, 1 if one does not, 2 for bad input, 3 without truth files.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Iterable

from _bench import BenchFigure, finish, leave, table
from _device_trace import replay_trace
from _truth import in_processes, prefix, read_truths, say_none, say_rehearsal, truth_options
from _truth_files import LimitTruth, TimedSteps, Truth, TruthCase
from gpu import cases, simulated

from trainfit.results.files.errors import ResultFileError

QUICK_FILES = 8
MIB = 1 << 20

ALLOCATED_PERCENT = 0.5
RESERVED_PERCENT = 2.0

NONE_YET = """no truth files in {folder}: none was recorded yet, so nothing is compared.
To record: on a machine with an NVIDIA GPU and torch, run
    python bench/gpu/campaign.py --out {folder}
and run this again; it needs no GPU."""


@dataclasses.dataclass(frozen=True)
class ComparedMemory:
    """One case: bytes measured and simulated, how the replay went, or why it could not be."""

    name: str
    gpu: str
    replay: str | None
    replayed_events: int
    measured: tuple[int, int] = (0, 0)
    simulated: tuple[int, int] | None = None
    same_end: bool = True
    problem: str | None = None

    def error_percent(self, which: int) -> float:
        """Signed, of allocated (0) or reserved (1) bytes."""
        assert self.simulated is not None
        return 100 * (self.simulated[which] / self.measured[which] - 1)


@dataclasses.dataclass(frozen=True)
class ComparedLimit:
    """The largest batch under a limit: measured, and from two simulated batches.

    ``full`` is the smallest batch that was too large, ``None`` where none was found.
    """

    name: str
    gpu: str
    measured: int
    full: int | None
    predicted: int | None
    problem: str | None = None

    @property
    def right(self) -> bool | None:
        """Did the predicted batch run and the next one up not? ``None``: nobody tried."""
        if self.predicted is None or self.predicted < self.measured:
            return False
        if self.full is None:
            return None
        if self.predicted >= self.full:
            return False
        return True if self.full == self.measured + 1 else None


def main(argv: list[str] | None = None) -> int:
    options = truth_options(__doc__, f"{QUICK_FILES} files").parse_args(argv)
    try:
        truths = read_all(options)
    except ResultFileError as error:
        leave(error)
    if not truths:
        return say_none(NONE_YET, options)
    found = in_processes(compare_any, truths, options.jobs)
    rows = [memory for memory in found if isinstance(memory, ComparedMemory)]
    limits = [limit for limit in found if isinstance(limit, ComparedLimit)]
    say_rehearsal(options)
    details = {
        "rehearsal": options.rehearsal,
        "cases": [dataclasses.asdict(row) for row in rows],
        "limits": [dataclasses.asdict(row) for row in limits],
    }
    tables = [shown(rows), limits_shown(limits)]
    return finish(figures(rows, limits, prefix(options)), options.json, details, tables)


OfMemory = Truth | LimitTruth


def compare_any(truth: OfMemory) -> ComparedMemory | ComparedLimit:
    simulated.as_in(truth.machine.torch)
    return compare(truth) if isinstance(truth, Truth) else compare_limit(truth)


def read_all(options: argparse.Namespace) -> list[OfMemory]:
    """What the folder holds of memory; raises ``ResultFileError`` for a damaged file."""
    truths = [truth for truth in read_truths(options) if not isinstance(truth, TimedSteps)]
    return thin(truths) if options.quick else truths


def thin(found: list[OfMemory]) -> list[OfMemory]:
    """Some at equal distances: a choice that sees no error."""
    step = max(len(found) / QUICK_FILES, 1)
    return [found[int(index * step)] for index in range(min(QUICK_FILES, len(found)))]


# -- one file --------------------------------------------------------------------------------------


def compare(truth: Truth) -> ComparedMemory:
    """Replay the recorded history, and run the same job on the simulated GPU."""
    replayed = replay_trace(truth.trace, truth.machine.memory_bytes, truth.reports)
    measured = (truth.memory.max_allocated_bytes, truth.memory.max_reserved_bytes)
    difference = replayed.difference
    if difference is None and truth.trace.whole:
        peaks = (replayed.peak_allocated_bytes, replayed.peak_reserved_bytes)
        if peaks != measured:
            difference = f"peaks {measured} bytes on the GPU, {peaks} in the model"
    row = ComparedMemory(
        name=truth.case.name,
        gpu=truth.machine.gpu,
        replay=difference,
        replayed_events=replayed.events,
        measured=measured,
    )
    try:
        figures, status = simulate(truth)
    except Exception as error:  # one case that cannot be simulated must not hide the others
        return dataclasses.replace(row, problem=f"{type(error).__name__}: {error}"[:200])
    return dataclasses.replace(row, simulated=figures, same_end=status == truth.status)


def simulate(truth: Truth) -> tuple[tuple[int, int], str]:
    """Peaks of allocated and reserved bytes of the same job, and how it ended."""
    import torch

    torch.set_num_threads(1)
    case = case_of(truth.case)
    gpu = simulated.spec_of(dataclasses.asdict(truth.machine))
    status = "ran"
    with simulated.simulated(gpu, conf=case.alloc_conf):
        from gpu.training import prepared

        if case.cap_bytes is not None:
            fraction = case.cap_bytes / gpu.memory_bytes
            torch.cuda.set_per_process_memory_fraction(fraction)
        try:
            prepared(case).run()
        except torch.cuda.OutOfMemoryError:
            status = "out_of_memory"
        peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    return peaks, status


def compare_limit(truth: LimitTruth) -> ComparedLimit:
    row = ComparedLimit(
        name=truth.case.name,
        gpu=truth.machine.gpu,
        measured=truth.capped.largest_ran,
        full=truth.capped.smallest_full,
        predicted=None,
    )
    try:
        spec = simulated.spec_of(dataclasses.asdict(truth.machine))
        predicted = simulated.predict_largest(case_of(truth.case), spec)
    except Exception as error:
        return dataclasses.replace(row, problem=f"{type(error).__name__}: {error}"[:200])
    return dataclasses.replace(row, predicted=predicted)


def case_of(case: TruthCase) -> cases.Case:
    return cases.Case(**dataclasses.asdict(case))


# -- all of them -----------------------------------------------------------------------------------


def figures(
    rows: list[ComparedMemory], limits: list[ComparedLimit], prefix: str
) -> list[BenchFigure]:
    """Cases that could not be simulated have a figure of their own, and no error."""
    done = [row for row in rows if row.simulated is not None]
    found: list[BenchFigure] = []

    def all_of(name: str, values: Iterable[bool]) -> None:
        kept = list(values)
        if kept:
            reached = 100 * sum(kept) / len(kept)
            found.append(BenchFigure(f"{prefix}_{name}", reached, 100, False, "%"))

    all_of("replay_exact", (row.replay is None for row in rows))
    all_of("cases_simulated", (row.problem is None for row in rows))
    all_of("same_end", (row.same_end for row in done))
    goals = {"allocated": ALLOCATED_PERCENT, "reserved": RESERVED_PERCENT}
    for which, (name, goal) in enumerate(goals.items()):
        errors = [abs(row.error_percent(which)) for row in done if row.same_end]
        if errors:
            median = statistics.median(errors)
            found.append(BenchFigure(f"{prefix}_{name}_median_error", median, goal, True, "%"))
    all_of("limits_right", (limit.right for limit in limits if limit.right is not None))
    return found


def shown(rows: list[ComparedMemory]) -> str:
    """A row for each case; MiB."""
    lines: list[tuple[object, ...]] = []
    for row in rows:
        cells: list[object] = []
        for which in (0, 1):
            cells.append(f"{row.measured[which] / MIB:.0f}")
            simulated = row.simulated
            cells.append(None if simulated is None else f"{simulated[which] / MIB:.0f}")
        end = row.problem or ("" if row.same_end else "one of them ran out of memory")
        lines.append((row.name, *cells, row.replay or f"{row.replayed_events} exact", end))
    heads = ("case, MiB", "allocated", "simulated", "reserved", "simulated", "replay", "")
    return table(heads, lines)


def limits_shown(limits: list[ComparedLimit]) -> str:
    heads = ("limit", "ran", "too large", "predicted")
    return table(heads, ((e.name, e.measured, e.full, e.problem or e.predicted) for e in limits))


if __name__ == "__main__":
    sys.exit(main())
