"""The batch size that a rule recommends, or shows as an option, is simulated before that.

Two runs give a rule for every other batch size as long as the script and its libraries do the same
at all of them. Some do not: another kernel, a copy from some size on, a branch. A third run shows.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from trainfit.memory.replay import Replay, Stream
from trainfit.plan.changes.amp import AmpSetting
from trainfit.plan.runs.batches import is_full
from trainfit.plan.runs.failures import ScriptError
from trainfit.plan.runs.progress import MAY_CHANGE
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.plan.sizing.costing import has_rates, step_seconds, work_law
from trainfit.plan.sizing.curve import Grain
from trainfit.plan.sizing.memory_model import Batches
from trainfit.plan.sizing.planned_job import PlannedJob
from trainfit.results.configuration import BatchCheck
from trainfit.results.runs.recording import NotAffineError
from trainfit.results.runs.spec import RunSpec
from trainfit.results.text import duration
from trainfit.simgpu.device.settling import LEAST_STEPS
from trainfit.speed.step import step_time

#: A rule holds where a simulated run lies this close to it. The typical of a few steps differs a
#: little from the typical of others; a rule that does not hold was never seen this close.
_PEAK, _STEP = 0.01, 0.03
#: Seconds that a run may wait for its own DataLoader.
_LOADING_S: Final = 60.0


def confirmed(job: PlannedJob, setting: AmpSetting) -> AmpSetting:
    """``setting`` with a recommended batch size that was simulated, where that can be.

    Where the rule does not hold there, one from larger batch sizes is sought, and at last batch
    sizes are simulated one by one.
    """
    found = _confirmed(job, setting)
    if found is setting.batches:
        return setting
    return dataclasses.replace(
        setting,
        batches=found,
        configuration=job.configuration(setting.trace, found, setting.spec),
    )


def _confirmed(job: PlannedJob, setting: AmpSetting) -> Batches:
    batches, present, shapes = setting.batches, job.batch, job.shapes
    sized = timing = setting.spec
    if shapes is not None:
        sized, timing = shapes.sized(sized), shapes.timed(timing)
    if present is None:
        return batches
    seen: dict[int, Trace] = {}
    wrong = ""
    for may_repeat in (True, False):
        if batches.law is None or not batches.recommended:
            return batches
        found = _checked(job, batches, sized, seen, is_timed=sized == timing)
        if isinstance(found, Batches):
            return found
        at, wrong = found
        job.notes.append(wrong)
        lower = Grain.of(job.gpu, job.unit).rounded(at // 2)
        if may_repeat and lower > 1:
            pair = [(lower, at)]
            batches = job.batch_sizes().find(
                setting.trace, present, pair, setting.spec, by_trial=True
            )
    known = {present: job.runs.trace(present, sized), **seen}
    return job.batch_sizes().one_by_one(known, present, setting.spec, wrong)


def _checked(
    job: PlannedJob, batches: Batches, spec: RunSpec, seen: dict[int, Trace], *, is_timed: bool
) -> Batches | tuple[int, str]:
    """``batches`` with what runs of the option's and the recommended batch size said, which are
    added to ``seen``; or the one at which the rule does not hold, and by how much."""
    best, check, peak = batches.recommended or 0, batches.check, batches.recommended_peak
    for at in dict.fromkeys((batches.furthest or best, best)):
        run = _run(job, batches, at, spec)
        if isinstance(run, str):
            job.notes.add(
                f"batch size {at} was not simulated: {run}; its figures follow from batch sizes "
                f"{_sizes(batches)}",
                MAY_CHANGE,
            )
            check = BatchCheck(at, run)
            continue
        seen[at] = run
        check, run_peak = _compared(job, batches, at, run, is_timed=is_timed)
        if not _holds(check):
            return at, _wrong(batches, check)
        if at == best:
            peak = run_peak
    return dataclasses.replace(batches, recommended_peak=peak, check=check)


def _run(job: PlannedJob, batches: Batches, at: int, spec: RunSpec) -> Trace | str:
    """The run at a batch size, or why there is none."""
    if at not in dict(batches.pair):
        long = _loading_s(job.first, at)
        if long > _LOADING_S:
            return f"its batches need {duration(long)} to load here"
    try:
        trace = job.runs.trace(at, spec)
    except ScriptError as error:
        return error.in_note
    return trace if is_full(trace, at) else "the DataLoader returned fewer samples"


def _loading_s(first: Trace, at: int) -> float:
    """Seconds that the batches of a run at batch size ``at`` need to load here, about."""
    loader, sample_s = first.outcome.loader, first.outcome.sample_s or 0.0
    at_once = min(max(1, loader.settings.num_workers), LEAST_STEPS) if loader is not None else 1
    return LEAST_STEPS * at * sample_s / at_once


def _compared(
    job: PlannedJob, batches: Batches, at: int, run: Trace, *, is_timed: bool
) -> tuple[BatchCheck, Replay]:
    """A run compared with the prediction of the rule."""
    assert batches.law is not None
    recording = recording_of(run)
    peak = job.memory_model.limited(Stream.of(recording))
    replay = job.memory_model.limited(batches.law.at(at))
    above = peak.peak_reserved / replay.peak_reserved - 1
    by_rule = _step_by_rule(job, batches, at) if is_timed else None
    took = step_seconds(recording, job.machine)
    slower = took / by_rule - 1 if took is not None and by_rule else None
    return BatchCheck(at, "", above, slower), peak


def _step_by_rule(job: PlannedJob, batches: Batches, at: int) -> float | None:
    """``None`` where steps have no rule: their curve is from simulated ones."""
    if not has_rates(job.machine.gpu):
        return None
    try:
        return step_time(work_law(batches.pair).at(at), job.machine).seconds
    except NotAffineError:
        return None


def _holds(check: BatchCheck) -> bool:
    return abs(check.peak_share or 0.0) <= _PEAK and abs(check.step_share or 0.0) <= _STEP


def _wrong(batches: Batches, check: BatchCheck) -> str:
    parts = [
        f"{what} {share:+.0%}"
        for what, share in (("memory", check.peak_share), ("step", check.step_share))
        if share is not None
    ]
    return (
        f"the rule from batch sizes {_sizes(batches)} does not hold at {check.batch_size} "
        f"({', '.join(parts)})"
    )


def _sizes(batches: Batches) -> str:
    return " and ".join(str(size) for size, _ in batches.pair)
