"""Predicted against measured times of small programs of every class of kernels (bench/gpu).

For every program of `bench/gpu/kernels.py` in the file: the same one on the simulated GPU of that
name, what the model says of its kernels next to what a call took; and again by a calibration
profile of that GPU. Programs outside a CUDA graph take what the CPU takes to launch them, where
that is more. What the CPU took for single calls comes in a table of its own.

    python bench/gpu/kernel_truth.py FILE [--profile PROFILE] [--rows] [--json]

Exit status: 0 if every goal holds, 1 if one does not, 2 for bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _bench import BenchFigure, finish, leave, parser, table
from _truth import read_profile

from gpu import simulated

simulated.import_trainfit()

from trainfit.plan.calibration import CalibrationError  # noqa: E402
from trainfit.plan.sizing.costing import machine_of  # noqa: E402
from trainfit.results.files.errors import ResultFileError  # noqa: E402
from trainfit.results.plan import HostCpu  # noqa: E402
from trainfit.speed.step import REFERENCE_OPERATOR_S, HostedGpu, TimedWork  # noqa: E402
from trainfit.speed.work import Work  # noqa: E402

PERCENT, PERCENT_WITH_PROFILE = 15.0, 8.0


@dataclasses.dataclass(frozen=True)
class ComparedProgram:
    """Seconds of a program's call; ``by_profile_s`` is ``None`` without a profile."""

    kind: str
    name: str
    measured_s: float
    predicted_s: float
    by_profile_s: float | None = None

    def off(self, predicted_s: float) -> float:
        """By how much of what was measured a prediction is more."""
        return predicted_s / self.measured_s - 1


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        found = json.loads(options.file.read_text())
        profile = None if options.profile is None else read_profile(options.profile)
    except (OSError, ValueError, ResultFileError, CalibrationError) as error:
        leave(error)
    gpu = simulated.spec_of(found["machine"])
    operator_s = found["operator_s"]
    cpu = HostCpu(None, None, REFERENCE_OPERATOR_S / operator_s) if operator_s else None
    machines = [machine_of(gpu, cpu)]
    if profile is not None:
        machines.append(machine_of(gpu, None, profile.rates, str(options.profile)))
    rows = list(compare(found["seconds"], gpu, machines))
    calls = list(compare_calls(found["host_s"], gpu, machines))
    details = {"programs": list(map(dataclasses.asdict, rows)),
               "calls": list(map(dataclasses.asdict, calls))}  # fmt: skip
    tables = [by_class(rows), *([shown(rows)] if options.rows else []), shown(calls)]
    return finish(figures(rows), options.json, details, tables)


def parse(argv: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("file", type=Path, help="what bench/gpu/kernels.py wrote")
    made.add_argument("--profile", type=Path, help="of `trainfit calibrate`")
    made.add_argument("--rows", action="store_true", help="a row for each program, too")
    return made.parse_args(argv)


def compare(
    measured: Mapping[str, float], gpu: Any, machines: Sequence[HostedGpu]
) -> Iterable[ComparedProgram]:
    """Every program that was timed."""
    from gpu.kernels import programs

    for program in programs():
        if program.name in measured:
            work = work_of(program.make, gpu)
            predicted = [program_seconds(work, machine, program.graphed) for machine in machines]
            kind = program.name.partition(":")[0]
            yield ComparedProgram(kind, program.name, measured[program.name], *predicted)


def compare_calls(
    measured: Mapping[str, Sequence[float]], gpu: Any, machines: Sequence[HostedGpu]
) -> Iterable[ComparedProgram]:
    """What the CPU takes for single calls, until they return."""
    from gpu.kernels import host_calls

    for name, _, make in host_calls():
        if name in measured:
            work, calls = work_of(make, gpu, prepared=True), measured[name][0]
            yield ComparedProgram(
                "CPU", name, calls, *(host_seconds(work, machine) for machine in machines)
            )


def work_of(make: Any, gpu: Any, prepared: bool = False) -> tuple[Work, int]:
    """What a call launches, after a first one, and of how many equal parts it consists."""
    with simulated.simulated(gpu, limited=False, conf="") as simulation:
        call = make()
        prepare = getattr(call, "prepare", lambda: None)
        for _ in range(2):
            prepare()
            simulation.end_step()
            call()
            simulation.end_step()
        recording = simulation.recording
    return Work.of_step(recording, recording.steps - 1), getattr(call, "of", 1)


def program_seconds(work: tuple[Work, int], machine: HostedGpu, graphed: bool) -> float:
    """Of one of many calls in a row."""
    timed = TimedWork(work[0], machine)
    kernels = float((timed.seconds + timed.copies).sum())
    return kernels if graphed else max(kernels, timed.issued()[1])


def host_seconds(work: tuple[Work, int], machine: HostedGpu) -> float:
    """What the CPU takes to launch a part of a call."""
    return TimedWork(work[0], machine).issued()[1] / work[1]


def by_class(rows: Sequence[ComparedProgram]) -> str:
    """Median and 90th percentile of the errors' sizes, and the median error, in percent."""
    lines = []
    for kind in dict.fromkeys(row.kind for row in rows):
        mine = [row for row in rows if row.kind == kind]
        columns = [[row.off(row.predicted_s) for row in mine]]
        if all(row.by_profile_s is not None for row in mine):
            columns.append([row.off(row.by_profile_s or 0.0) for row in mine])
        lines.append((kind, len(mine), *(each for column in columns for each in _three(column))))
    heads = ("class", "programs", "median", "90th", "bias", "by profile", "90th", "bias")
    return table(heads[: len(lines[0])], lines)


def _three(errors: Sequence[float]) -> tuple[str, str, str]:
    sizes = np.abs(errors)
    both = np.median(sizes), np.quantile(sizes, 0.9)
    return f"{both[0]:.1%}", f"{both[1]:.0%}", f"{np.median(errors):+.1%}"


def shown(rows: Sequence[ComparedProgram]) -> str:
    """A row for each."""
    lines = []
    for row in rows:
        line = [row.name, 1e6 * row.measured_s, 1e6 * row.predicted_s,
                f"{row.off(row.predicted_s):+.0%}"]  # fmt: skip
        if row.by_profile_s is not None:
            line += [1e6 * row.by_profile_s, f"{row.off(row.by_profile_s):+.0%}"]
        lines.append(line)
    heads = ("", "measured, us", "predicted", "error", "by profile", "error")
    return table(heads[: len(lines[0])], lines)


def figures(rows: Sequence[ComparedProgram]) -> list[BenchFigure]:
    """The median of all programs' errors, in percent, without and with the profile."""
    errors = [abs(row.off(row.predicted_s)) for row in rows]
    found = [
        BenchFigure("program_median_error", 100 * float(np.median(errors)), PERCENT, True, "%")
    ]
    if all(row.by_profile_s is not None for row in rows):
        errors = [abs(row.off(row.by_profile_s or 0.0)) for row in rows]
        value = 100 * float(np.median(errors))
        name = "program_median_error_by_profile"
        found.append(BenchFigure(name, value, PERCENT_WITH_PROFILE, True, "%"))
    return found


if __name__ == "__main__":
    sys.exit(main())
