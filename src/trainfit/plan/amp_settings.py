"""The job with AMP as it is and otherwise: each setting that is simulated, and the chosen one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trainfit.hardware import GpuSpec
from trainfit.plan.amp_choice import AmpSetting, choose_amp, is_emulated
from trainfit.plan.batches import Batches
from trainfit.plan.command import Command
from trainfit.plan.failures import NotSimulated, ScriptError
from trainfit.plan.full_batches import full_steps, is_full
from trainfit.plan.launch import ACCELERATE, PRECISIONS
from trainfit.plan.planned_job import PlannedJob
from trainfit.plan.runs import AS_WRITTEN, Variant
from trainfit.plan.speed import has_rates
from trainfit.plan.tracing import recording_of
from trainfit.plan.trial_curve import timed
from trainfit.results.plan import AmpChoice


def opposite_amp(job: PlannedJob) -> Variant:
    """The command with autocast the other way round; not on in what the GPU emulates, where the
    command can say so."""
    is_on = job.first.outcome.autocast is not None
    if job.command.other_amp is not None:
        return Variant(amp=other_value(job.command, job.gpu, is_on=is_on))
    return Variant(force="off" if is_on else "on")


def other_value(command: Command, gpu: GpuSpec, *, is_on: bool) -> str | None:
    """The value for ``{amp}`` of autocast the other way round; ``None`` without the placeholder."""
    on = None if is_on or gpu.supports_bf16 else command.float16_amp
    return on or command.other_amp


def present_setting(job: PlannedJob) -> AmpSetting:
    """The job with AMP as the command has it."""
    batches = job.batches(job.first, AS_WRITTEN, by_trial=True)
    now = job.configuration(job.first, batches)
    return AmpSetting(job.command.present.get("amp"), AS_WRITTEN, job.first, now, batches)


def other_settings(job: PlannedJob, present: AmpSetting, flipped: Variant) -> list[AmpSetting]:
    """AMP the other way round and, where that or the present emulates, in float16."""
    found = []
    other = _setting(job, flipped, present)
    if other is not None:
        found.append(other)
        if flipped.force == "on":
            job.notes.append(
                "AMP on was simulated by torch.autocast around the model's forward calls: the "
                "command has no {amp}"
            )
            _note_accelerate(job, other.dtype)
    emulating = next((each for each in (present, *found) if is_emulated(each.dtype, job.gpu)), None)
    if emulating is not None and has_rates(job.gpu):
        forced = dataclasses.replace(emulating.variant, force="float16")
        value = job.command.float16_amp
        half = None
        if value is not None and job.runs.attempt(job.batch, Variant(amp=value)).outcome.steps:
            half = _setting(job, Variant(amp=value), present)
        half = half or _setting(job, forced, present)
        if half is not None and half.dtype == "float16":
            found.append(half)
    return found


def chosen_setting(
    job: PlannedJob, present: AmpSetting, others: Sequence[AmpSetting]
) -> tuple[AmpChoice | None, AmpSetting]:
    """The setting that the launch command asks for, with its own batch size."""
    choice = choose_amp(present, others, job.gpu)
    if choice is None or choice.configuration is None:
        return choice, present
    chosen = next(each for each in others if each.configuration is choice.configuration)
    if job.batch is not None and _is_unknown(chosen.batches):
        found = job.batches(chosen.trace, chosen.variant, by_trial=True)
        configuration = job.configuration(chosen.trace, found)
        chosen = dataclasses.replace(chosen, batches=found, configuration=configuration)
        choice = dataclasses.replace(choice, configuration=configuration)
    return choice, chosen


def _is_unknown(batches: Batches) -> bool:
    """Was nothing derived for other batch sizes, as no run was made for it?"""
    return batches.law is None and not batches.curve.steps


def _setting(job: PlannedJob, variant: Variant, present: AmpSetting) -> AmpSetting | None:
    """The job with AMP as in ``variant``; ``None``, and a note, where that was not to be
    simulated."""
    try:
        trace = job.runs.trace(job.batch, variant)
    except NotSimulated:
        return None
    except ScriptError as error:
        what = f"AMP {variant.amp or variant.force}"
        job.notes.append(f"{what} was not simulated: {error}")
        return None
    # What the launch command may ask for is compared at its own best batch size.
    value = variant.amp if variant.force is None else None
    if value is None and present.batches.law is None:
        why = "other batch sizes were simulated with the present AMP alone"
        batches = Batches("one trace", why)
    else:
        batches = job.batches(trace, variant, by_trial=value is not None and has_rates(job.gpu))
    found = AmpSetting(value, variant, trace, job.configuration(trace, batches), batches)
    if not _is_unknown(batches):
        return found
    rate = _samples_per_s(job, variant, present.batches.recommended)
    return dataclasses.replace(found, samples_per_s=rate)


def _samples_per_s(job: PlannedJob, variant: Variant, batch: int | None) -> float | None:
    """Those of ``variant`` at a batch size, by a run there; ``None`` where nothing tells them."""
    if not batch or not has_rates(job.gpu):
        return None
    variant = variant if job.shapes is None else job.shapes.timed(variant)
    try:
        trace = job.runs.trace(batch, variant)
    except (NotSimulated, ScriptError):
        return None
    if not is_full(trace, batch):
        return None
    step = timed(recording_of(trace), batch, job.machine, full_steps(trace))
    return step.samples_per_s if step is not None else None


def _note_accelerate(job: PlannedJob, dtype: str | None) -> None:
    """AMP on is one variable away where Accelerate asks the environment."""
    precision = PRECISIONS.get(dtype or "")
    if job.runs.trace(job.batch, AS_WRITTEN).outcome.accelerate == "no" and precision:
        job.notes.append(
            f"{ACCELERATE}={precision} before the command switches AMP on: its Accelerate "
            "asks the environment"
        )
