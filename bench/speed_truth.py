"""Predicted against measured step times, on the timed jobs of the truth campaign (bench/gpu).

For every `steps-…` file and batch size: the same job on the simulated GPU of that name, its
predicted step next to the median of the measured ones; and again by a calibration profile of that
GPU, where one is given. Files are what `python bench/gpu/campaign.py --only steps-` writes on a
machine with an NVIDIA GPU, the profile what `trainfit calibrate --output FILE` does there.

    python bench/speed_truth.py [--truth DIR] [--profile FILE] [--only PATTERN] [--quick] [--json]

Exit status: 0 if every goal holds, 1 if one does not, 2 for bad input, 3 without such files.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from _bench import BenchFigure, finish, leave, table
from _truth import (
    in_processes,
    prefix,
    read_profile,
    read_truths,
    say_none,
    say_rehearsal,
    truth_options,
)
from _truth_files import TimedSteps
from gpu import simulated
from gpu.cases import Case

from trainfit.hardware.context_memory import ProfileMismatch, check_profile
from trainfit.plan.calibration import CalibrationError
from trainfit.plan.sizing.costing import machine_of, step_seconds
from trainfit.results.files.errors import ResultFileError
from trainfit.results.gpus import Profile
from trainfit.results.plan import HostCpu
from trainfit.speed.step import REFERENCE_OPERATOR_S

PERCENT, PERCENT_WITH_PROFILE = 15.0, 8.0

NONE_YET = """no step times in {folder}: none were recorded yet, so nothing is compared.
To record: on a machine with an NVIDIA GPU and torch, run
    python bench/gpu/campaign.py --only steps- --out {folder}
    trainfit calibrate --output profile.json
and then, anywhere, `python bench/speed_truth.py --profile profile.json`."""


@dataclasses.dataclass(frozen=True)
class ComparedStep:
    """A step in seconds; ``by_profile_s`` is ``None`` without a profile."""

    gpu: str
    name: str
    batch: int
    measured_s: float
    predicted_s: float
    by_profile_s: float | None

    def off(self, predicted_s: float) -> float:
        """By how much of what was measured a prediction is more."""
        return predicted_s / self.measured_s - 1


@dataclasses.dataclass(frozen=True)
class _Work:
    """One batch size of a file."""

    truth: TimedSteps
    batch: int
    measured_s: float
    profile: Profile | None
    title: str


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        profile = None if options.profile is None else read_profile(options.profile)
        work = read_all(options, profile)
    except (ResultFileError, CalibrationError) as error:
        leave(error)
    if not work:
        return say_none(NONE_YET, options)
    try:
        rows = in_processes(compare, work, options.jobs)
    except (ProfileMismatch, ValueError) as error:
        leave(error)
    say_rehearsal(options)
    details = {"rehearsal": options.rehearsal, "steps": [dataclasses.asdict(row) for row in rows]}
    return finish(figures(rows, prefix(options)), options.json, details, [shown(rows)])


def parse(argv: list[str] | None) -> argparse.Namespace:
    made = truth_options(__doc__, "two batch sizes of each job")
    made.add_argument("--profile", type=Path, metavar="FILE", help="of `trainfit calibrate`")
    return made.parse_args(argv)


def read_all(options: argparse.Namespace, profile: Profile | None) -> list[_Work]:
    """Every batch size that was timed; raises ``ResultFileError`` for a damaged file."""
    work: list[_Work] = []
    for truth in read_truths(options):
        if not isinstance(truth, TimedSteps):
            continue
        ran = [
            timed_batch
            for timed_batch in truth.timed
            if timed_batch.status == "ran" and timed_batch.seconds
        ]
        # The first and the last: a choice that sees no error.
        chosen = [ran[0], ran[-1]] if options.quick and len(ran) > 1 else ran
        for batch in chosen:
            measured = statistics.median(batch.seconds)
            work.append(_Work(truth, batch.batch, measured, profile, str(options.profile)))
    return work


def compare(work: _Work) -> ComparedStep:
    """The job at this batch on the simulated GPU, costed without and with the profile.

    Raises ``ValueError`` for a GPU whose rates nothing knows.
    """
    truth = work.truth
    gpu = simulated.spec_of(dataclasses.asdict(truth.machine))
    if not gpu.sources:
        raise ValueError(f"{truth.machine.gpu}: not in the catalogue, so its rates are not known")
    case = Case(**dataclasses.asdict(truth.case))
    recording = simulated.record(dataclasses.replace(case, batch=work.batch), gpu)
    core = None if truth.operator_s is None else REFERENCE_OPERATOR_S / truth.operator_s
    cpu = HostCpu(None, None, core)
    predicted = step_seconds(recording, machine_of(gpu, cpu))
    assert predicted is not None
    by_profile = None
    if work.profile is not None:
        check_profile(work.profile, work.title, gpu, truth.machine.driver, force=False)
        machine = machine_of(gpu, None, work.profile.rates, work.title)
        by_profile = step_seconds(recording, machine)
    return ComparedStep(gpu.name, case.job, work.batch, work.measured_s, predicted, by_profile)


def shown(rows: Sequence[ComparedStep]) -> str:
    """A row for each step."""
    lines = []
    for row in rows:
        both = [None, None]
        if row.by_profile_s is not None:
            both = [1e3 * row.by_profile_s, f"{row.off(row.by_profile_s):+.0%}"]
        mine = 1e3 * row.predicted_s, f"{row.off(row.predicted_s):+.0%}"
        lines.append((row.name, row.batch, 1e3 * row.measured_s, *mine, *both))
    heads = ("job", "batch", "measured, ms", "predicted", "error", "by profile", "error")
    return table(heads, lines)


def figures(rows: Sequence[ComparedStep], prefix: str) -> list[BenchFigure]:
    """The median of all steps' errors, in percent, without and with the profile."""
    found = [_figure(f"{prefix}_step_median_error", rows, PERCENT, "predicted_s")]
    if all(row.by_profile_s is not None for row in rows):
        name = f"{prefix}_step_median_error_by_profile"
        found.append(_figure(name, rows, PERCENT_WITH_PROFILE, "by_profile_s"))
    return found


def _figure(name: str, rows: Sequence[ComparedStep], goal: float, column: str) -> BenchFigure:
    errors = [abs(row.off(getattr(row, column))) for row in rows]
    return BenchFigure(name, 100 * statistics.median(errors), goal, at_most=True, unit="%")


if __name__ == "__main__":
    sys.exit(main())
