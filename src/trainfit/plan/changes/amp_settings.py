"""Simulated AMP settings of a job, and the chosen one: memory and time saved, or why little."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from trainfit.hardware import GpuSpec
from trainfit.memory.replay import Replay, Stream
from trainfit.plan.changes.amp import LEAST_GAIN, AmpSetting, choose_amp
from trainfit.plan.changes.amp_hazards import (
    PeakParts,
    StepParts,
    is_native,
    of_failure,
    of_gpu,
    of_none,
    of_run,
    peak_parts,
    place_of,
    step_parts,
)
from trainfit.plan.command.file_values import precision_line
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.precision import other_value
from trainfit.plan.command.script_lines import is_packages, package_says
from trainfit.plan.command.wrappers import ACCELERATE, PRECISIONS
from trainfit.plan.runs.batches import full_steps, is_full
from trainfit.plan.runs.failures import NotSimulated, ScriptError
from trainfit.plan.runs.tracing import recording_of
from trainfit.plan.sizing.costing import has_rates
from trainfit.plan.sizing.curve import timed
from trainfit.plan.sizing.memory_model import Batches
from trainfit.plan.sizing.planned_job import PlannedJob
from trainfit.plan.sizing.speed import speed
from trainfit.results.configuration import AmpChoice, Configuration
from trainfit.results.findings import Finding
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import AS_WRITTEN, RunSpec
from trainfit.results.runs.steps import Framework
from trainfit.results.runs.trace import ForcedAmp
from trainfit.results.text import duration, percent, size
from trainfit.speed.step import HostedGpu

# ---
# Memory and time saved by mixed precision, with the reason if it is little.


#: Savings below which it is said what stays: autocast at its best saves about half.
_LITTLE: Final = 0.25
#: A part of a peak or of a step that is named.
_NAMED: Final = 0.1


def memory_reason(off: tuple[Recording, Replay], half: tuple[Recording, Replay], dtype: str) -> str:
    """One line on the peak of allocated memory in both."""
    before, after = off[1].peak_allocated, half[1].peak_allocated
    saved = before - after
    if before <= 0:
        return ""
    text = f"{dtype} saves {size(saved)} of {size(before)} ({percent(saved / before)})"
    if saved < 0:
        text = f"{dtype} uses {size(-saved)} more than the {size(before)} without it"
    if saved >= _LITTLE * before:
        return text
    kept = _kept(peak_parts(half[0], Stream.of(half[0]), half[1]))
    return f"{text}: of the peak in {dtype}, {kept}" if kept else text


def _kept(parts: PeakParts) -> str:
    """What autocast does not make smaller, the largest first."""
    text = f" (most at {place_of(parts.promoted_at)})" if parts.promoted_at else ""
    named = {
        "parameters, gradients and optimizer state, which keep their type": parts.state,
        "copies that autocast casts": parts.casts,
        "results of operators that autocast runs in float32": parts.float32,
        f"results that are float32 because an operand is{text}": parts.promoted,
        "inputs and workspaces": parts.fixed,
    }
    return _shares(named, parts.total)


def time_reason(
    off: Recording, half: Recording, dtype: str, machine: HostedGpu, batch: int | None = None
) -> str:
    """One line on a step's time in both, at batch size ``batch`` (``None``: not known)."""
    before, after = speed(off, None, machine), speed(half, None, machine)
    if before is None or after is None:
        return ""
    slow, fast = before.now.seconds, after.now.seconds
    phrase = "" if batch is None else f" at batch size {batch}"
    text = f"a step{phrase} needs {duration(fast)} instead of {duration(slow)} in {dtype}"
    if slow <= 0 or fast <= (1 - _LITTLE) * slow:
        return text
    parts, without = step_parts(half, machine), step_parts(off, machine)
    if parts is None or without is None:
        return text
    added = parts.casts - without.casts
    if after.now.bound == "launches":
        casts = f"{added} launches of casts are added, and " if added > 0 else ""
        return f"{text}: {casts}it is bound by launches"
    if after.now.bound == "host copies":
        return f"{text}: it is bound by copies between host and device"
    if after.now.bound == "communication":
        return f"{text}: it is bound by communication between GPUs"
    kept = _kept_time(parts)
    return f"{text}: of the kernels' time, {kept}" if kept else text


def _kept_time(parts: StepParts) -> str:
    named = {
        "the optimizer, which autocast does not change": parts.optimizer_s,
        "operators that autocast runs in float32": sum(parts.float32_s.values()),
        "casts": parts.casts_s,
    }
    return _shares(named, parts.gpu_s)


def _shares(named: dict[str, float] | dict[str, int], whole: float) -> str:
    large = sorted(named.items(), key=lambda each: -each[1])
    texts = [
        f"{percent(part / whole)} are {name}" for name, part in large if part >= _NAMED * whole
    ]
    return ", ".join(texts)


_HALVES: tuple[ForcedAmp, ...] = ("bfloat16", "float16")


def opposite_amp(job: PlannedJob) -> RunSpec:
    """The command with mixed precision the other way round; not on in what the GPU emulates, where
    the command can say so; as it is written where nothing but the script switches FSDP's off."""
    is_on = job.first.outcome.half is not None
    if job.command.other_amp is not None:
        return _with_value(other_value(job.command, job.gpu, is_on=is_on))
    # A variable switches off only what a variable has switched on.
    if asks_environment(job) and (not is_on or job.first.outcome.accelerate != "no"):
        return RunSpec(variables={ACCELERATE: _word("off" if is_on else _best_half(job))})
    if is_on and job.first.outcome.autocast is None:
        return AS_WRITTEN
    return RunSpec(force="off" if is_on else "on")


def asks_environment(job: PlannedJob) -> bool:
    """Does the script's Accelerate take its precision from a variable that is free to be set?"""
    command = job.command
    is_free = "amp" not in command.present and ACCELERATE not in command.environment()
    return is_free and job.first.outcome.accelerate is not None


def present_setting(job: PlannedJob) -> AmpSetting:
    """The job with AMP as the command has it."""
    batches = job.batches(job.first, AS_WRITTEN, by_trial=True)
    now = job.configuration(job.first, batches, AS_WRITTEN)
    variable = job.first.outcome.accelerate if asks_environment(job) else None
    setting = AmpSetting(
        job.command.present.get("amp"), AS_WRITTEN, job.first, now, batches, variable=variable
    )
    return dataclasses.replace(setting, hazards=tuple(_hazards(job, setting)))


def other_settings(
    job: PlannedJob, present: AmpSetting, flipped: RunSpec
) -> tuple[list[AmpSetting], list[Finding]]:
    """AMP the other way round and the half precisions that are left, and what failed.

    Where the GPU computes in both half precisions one of them is simulated, and the other's figures
    are the same (:class:`~trainfit.results.configuration.AmpCandidate`); where one is emulated, or
    fails, the other is simulated too.
    """
    failed: list[Finding] = []
    if flipped == AS_WRITTEN or job.too_large:
        return [], failed
    # Of FSDP's mixed precision a switch of autocast changes nothing.
    tried = _tried(job, flipped, present, failed)
    settings = [setting for setting in tried if setting.dtype != present.dtype]
    if settings and flipped.force == "on":
        job.notes.append(
            "AMP on was simulated by torch.autocast around the model's forward calls: the "
            "command has no {amp}"
        )
    halves = [setting for setting in (present, *settings) if setting.dtype in _HALVES]
    visited = {half.dtype for half in halves} | {finding.subject for finding in failed}
    for dtype in _HALVES:
        if dtype in visited or not has_rates(job.gpu) or not is_native(dtype, job.gpu):
            continue
        native = next((half for half in halves if is_native(half.dtype, job.gpu)), None)
        if native is not None:
            settings.append(_as_of(job, native, dtype))
        elif halves or any(finding.kind == "overflow" for finding in failed):
            like = halves[0].spec if halves else flipped
            settings += _asked(job, dtype, present, like, failed)
    return settings, failed


def chosen_setting(
    job: PlannedJob,
    present: AmpSetting,
    others: list[AmpSetting],
    failed: Sequence[Finding],
) -> tuple[AmpChoice | None, AmpSetting]:
    """The setting that the launch command asks for, with its own batch size. One whose figures are
    another's is simulated before it is chosen, and then replaces that one among ``others``.
    """
    choice, chosen = _chosen(job, present, others, failed)
    while chosen.as_of:
        failures = list(failed)
        others.remove(chosen)
        others += _tried(job, chosen.spec, present, failures)
        failed = failures
        choice, chosen = _chosen(job, present, others, failed)
    if choice is None:
        return None, present
    if chosen is not present and job.batch is not None and _is_unknown(chosen.batches):
        found = job.batches(chosen.trace, chosen.spec, by_trial=True)
        configuration = job.configuration(chosen.trace, found, chosen.spec)
        chosen = dataclasses.replace(chosen, batches=found, configuration=configuration)
        choice = dataclasses.replace(choice, configuration=configuration)
    return _with_reasons(job, choice, (present, *others)), chosen


def _chosen(
    job: PlannedJob, present: AmpSetting, others: list[AmpSetting], failed: Sequence[Finding]
) -> tuple[AmpChoice | None, AmpSetting]:
    choice = choose_amp(present, others, job.gpu, failed)
    if choice is not None:
        choice = of_users_lines(choice, job.command, present.trace.outcome.amp.framework)
    if choice is None or choice.configuration is None:
        return choice, present
    return choice, next(
        setting for setting in others if setting.configuration is choice.configuration
    )


def of_users_lines(choice: AmpChoice, command: Command, framework: Framework = "") -> AmpChoice:
    """The same choice with a change by hand in the settings file that holds the precision, where
    one does; without that of an installed package, where what it would gain is a reason."""
    if not choice.by_hand:
        return choice
    present = next(
        (candidate.dtype for candidate in choice.candidates if candidate.asked == "present"), "off"
    )
    written = precision_line(command, present, choice.by_hand_dtype, framework)
    needs_more = any(
        hazard.kind == "no scaler" and hazard.subject == choice.by_hand_dtype
        for hazard in choice.hazards
    )
    if written is not None and not needs_more:
        by_hand = f"{choice.by_hand_gain}: {written.place}: {written.text}"
        return dataclasses.replace(choice, by_hand=by_hand, line=written.text, place=written.place)
    if not is_packages(choice.place, command):
        return choice
    reason = f"{choice.reason}; {choice.by_hand_gain}, but {package_says(choice.place)}"
    return dataclasses.replace(
        choice, reason=reason, by_hand="", by_hand_dtype="", line="", place=""
    )


def _with_reasons(job: PlannedJob, choice: AmpChoice, settings: Sequence[AmpSetting]) -> AmpChoice:
    """The same choice with what AMP saves: in the chosen half precision, else in one that the GPU
    computes in."""
    halves = [setting for setting in settings if setting.dtype in _HALVES and not setting.as_of]
    halves.sort(key=lambda each: (each.dtype != choice.dtype, not is_native(each.dtype, job.gpu)))
    off = next((setting.trace for setting in settings if setting.dtype == "off"), None)
    if off is None or not halves:
        return choice
    half, dtype = recording_of(halves[0].trace), halves[0].dtype
    without = recording_of(off)
    peaks = [(each, job.memory_model.unlimited(Stream.of(each))) for each in (without, half)]
    return dataclasses.replace(
        choice,
        memory_reason=memory_reason(peaks[0], peaks[1], dtype),
        time_reason=time_reason(without, half, dtype, job.machine, job.batch),
    )


def _asked(
    job: PlannedJob,
    dtype: ForcedAmp,
    present: AmpSetting,
    like: RunSpec,
    failed: list[Finding],
) -> Iterator[AmpSetting]:
    """A run in ``dtype``: as the command says it, if it does, else ``like``, autocast forced."""
    forced = dataclasses.replace(like, force=dtype)
    spec = _said(job, dtype)
    if spec is not None and job.runs.attempt(job.batch, spec).outcome.steps:
        settings = list(_tried(job, spec, present, failed))
    else:
        settings = list(_tried(job, forced, present, failed))
    yield from (setting for setting in settings if setting.dtype == dtype)


def _said(job: PlannedJob, dtype: str) -> RunSpec | None:
    """The command in ``dtype``; ``None`` where it has no word for it."""
    value = job.command.amp_precisions.get(dtype)
    if value is not None:
        return _with_value(value)
    return RunSpec(variables={ACCELERATE: _word(dtype)}) if asks_environment(job) else None


def _with_value(value: str | None) -> RunSpec:
    """The run with this in the command's place for AMP (``None``: as it is written)."""
    return AS_WRITTEN if value is None else RunSpec(values={"amp": value})


def _as_of(job: PlannedJob, half: AmpSetting, dtype: ForcedAmp) -> AmpSetting:
    """``half`` in the other half precision."""
    spec = _said(job, dtype)
    run_spec = spec or dataclasses.replace(half.spec, force=dtype)
    found = dataclasses.replace(
        half,
        value=run_spec.values.get("amp") if spec is not None else None,
        variable=run_spec.variables.get(ACCELERATE),
        spec=run_spec,
        configuration=dataclasses.replace(half.configuration, amp=dtype),
        as_of=half.dtype,
    )
    return dataclasses.replace(found, hazards=tuple(_hazards(job, found)))


def _hazards(job: PlannedJob, setting: AmpSetting) -> Iterator[Finding]:
    trains = not job.infers
    if setting.dtype == "off":
        if setting.spec != AS_WRITTEN:
            yield from of_none(setting.trace, trains=trains)
        return
    is_own = setting.spec.force is None and not setting.as_of
    yield from of_run(setting.dtype, setting.trace, job.machine, is_own=is_own, trains=trains)


def _best_half(job: PlannedJob) -> str:
    return "bfloat16" if job.gpu.supports_bf16 else "float16"


def _word(dtype: str) -> str:
    """Accelerate's word for a dtype."""
    return PRECISIONS.get(dtype, "no")


def _is_unknown(batches: Batches) -> bool:
    """Was nothing derived for other batch sizes, as no run was made for it?"""
    return batches.law is None and not batches.curve.steps


def _tried(
    job: PlannedJob, spec: RunSpec, present: AmpSetting, failed: list[Finding]
) -> Iterator[AmpSetting]:
    """The job with AMP as in ``spec``; nothing, and a note, where that was not to be simulated,
    and a hazard in ``failed`` where it was autocast that failed."""
    try:
        trace = job.runs.trace(job.batch, spec)
        job.runs.trace(job.batch, job.sized(spec))  # without which its memory is not known
    except NotSimulated:
        return
    except ScriptError as error:
        asked = spec.values.get("amp") or spec.variables.get(ACCELERATE) or spec.force
        what = f"AMP {asked}"
        job.notes.append(f"{what} was not simulated: {error.in_note}")
        outcome = job.runs.attempt(job.batch, spec).outcome
        if outcome.status == "failed" and outcome.autocast is not None:
            failed.append(of_failure(outcome.autocast, outcome, f"{what} fails: {error.in_note}"))
        return
    alone = Batches("one trace", f"slower than {present.dtype} as it is (--thorough has more)")
    is_asked = not job.thorough and present.dtype != "off"
    at_once = job.configuration(trace, alone, spec) if is_asked else None
    beaten = at_once is not None and is_beaten(at_once, present, job.gpu)
    # What the launch command may ask for is compared at its own best batch size.
    value = spec.values.get("amp") if spec.force is None else None
    said = value is not None or ACCELERATE in spec.variables
    if not said and present.batches.law is None:
        why = "other batch sizes were simulated with the current AMP alone"
        batches = Batches("one trace", why)
    elif beaten:
        batches = alone
    else:
        by_trial = said and has_rates(job.gpu) and job.thorough
        batches = job.batches(trace, spec, by_trial=by_trial)
    setting = AmpSetting(
        value,
        spec,
        trace,
        at_once if at_once and beaten else job.configuration(trace, batches, spec),
        batches,
        variable=spec.variables.get(ACCELERATE),
    )
    found = dataclasses.replace(setting, hazards=tuple(_hazards(job, setting)))
    if _is_unknown(batches) and not beaten:
        rate = _samples_per_s(job, spec, present.batches.recommended)
        found = dataclasses.replace(found, samples_per_s=rate)
    yield found


def is_beaten(without: Configuration, present: AmpSetting, gpu: GpuSpec) -> bool:
    """Does nothing hang on the batch sizes ``without`` AMP? At the present one it is slower than
    the command's own AMP and needs no less memory, and nothing speaks against that AMP; larger ones
    are to its favour still, as Tensor cores are idle less."""
    now = present.configuration
    if present.dtype == "off" or without.amp != "off" or now.step_s is None:
        return False
    if any(each.is_critical for each in (*of_gpu(present.dtype, gpu), *present.hazards)):
        return False
    is_slower = without.step_s is not None and without.step_s > (1 + LEAST_GAIN) * now.step_s
    return is_slower and without.memory.device_bytes >= now.memory.device_bytes


def _samples_per_s(job: PlannedJob, spec: RunSpec, batch: int | None) -> float | None:
    """The samples/s of ``spec`` at a batch size, by a run there; ``None`` where nothing tells
    them."""
    if not batch or not has_rates(job.gpu):
        return None
    spec = spec if job.shapes is None else job.shapes.timed(spec)
    try:
        trace = job.runs.trace(batch, spec)
    except (NotSimulated, ScriptError):
        return None
    if not is_full(trace, batch):
        return None
    step = timed(recording_of(trace), batch, job.machine, full_steps(trace))
    return step.samples_per_s if step is not None else None
