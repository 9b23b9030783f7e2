"""``trainfit plan``: from a training command to its launch line, step by step."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Final

from trainfit.findings.habits import of_evaluation
from trainfit.findings.habits import of_steps as of_habits
from trainfit.findings.out_of_memory import MISTAKES, TENSORS_KEPT, of_full_memory
from trainfit.findings.training.learning import of_learning
from trainfit.hardware import GpuSpec, catalogue, device_constants
from trainfit.hardware.gpu_figures import is_of_desktop
from trainfit.memory.held import full_memory
from trainfit.memory.replay import Stream
from trainfit.plan.changes.amp import AmpSetting
from trainfit.plan.changes.amp_hazards import unscaled
from trainfit.plan.changes.amp_settings import (
    chosen_setting,
    opposite_amp,
    other_settings,
    present_setting,
)
from trainfit.plan.changes.by_options import with_switches
from trainfit.plan.changes.remedies import try_remedies
from trainfit.plan.changes.trials import allocator_trial, gradients_both_ways
from trainfit.plan.command.file_values import batch_constant
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.script_lines import script_lines
from trainfit.plan.command.tunables import FRAMEWORKS
from trainfit.plan.command.wrappers import ACCELERATE
from trainfit.plan.confirmation import confirmed
from trainfit.plan.dataloader.section import is_tuned, plan_tuning, tuned
from trainfit.plan.epoch_end import EpochEnds, epoch_ends, within_epochs
from trainfit.plan.epoch_end import start as start_epoch_end
from trainfit.plan.first_run import LOOK_AT_SAMPLES_S, FirstRun, Settings
from trainfit.plan.growth_findings import of_steps, told_once
from trainfit.plan.launch import with_launch
from trainfit.plan.notes import (
    note_absent,
    note_accumulation,
    note_batches,
    note_context,
    note_interrupt,
    note_learning,
    note_steps,
    note_unused_gpus,
)
from trainfit.plan.runs.agreement import Agreement, agreement
from trainfit.plan.runs.agreement import start as start_comparison
from trainfit.plan.runs.batches import samples_used
from trainfit.plan.runs.failures import (
    NotSimulated,
    ScriptError,
    fails_later,
    mistakes_of,
    settings_of,
    with_stand_ins,
)
from trainfit.plan.runs.option_proof import accumulates
from trainfit.plan.runs.options import CommandOptions, require_named
from trainfit.plan.runs.processes import WarmProcesses
from trainfit.plan.runs.progress import as_progress
from trainfit.plan.runs.runs import Runs
from trainfit.plan.runs.tracing import Trace, Tracer, recording_of
from trainfit.plan.sizing.curve import with_step
from trainfit.plan.sizing.generation import generation
from trainfit.plan.sizing.lengths import length_option, tunable_sizes, tunable_to_size
from trainfit.plan.sizing.memory_model import Batches, Growth
from trainfit.plan.sizing.planned_job import PlannedJob
from trainfit.plan.sizing.recommendation import Accumulation, accumulation_for
from trainfit.plan.sizing.speed import launched_step, ranks_of, replicas_of, speed
from trainfit.plan.sizing.stages import gpus_of_process, of_gpus, pipeline, strays
from trainfit.plan.this_cpu import measured_cpu, with_cpu
from trainfit.results.changes import Remedies, ScriptLine
from trainfit.results.configuration import AmpChoice, EpochEnd
from trainfit.results.files.contents import complete
from trainfit.results.files.errors import TrainfitError
from trainfit.results.findings import Finding, by_severity
from trainfit.results.gpus import DeviceConstants, total
from trainfit.results.plan import Inference, PlanResult, TunableSizes, with_run_rate
from trainfit.results.runs.generation import Generation
from trainfit.results.runs.spec import RunSpec, TuningSpec
from trainfit.results.speed import StepSpeed
from trainfit.results.text import size
from trainfit.speed.slow_lines import float64_on_gpu, loops_on_gpu, sampling_before_step

Say = Callable[[str], None]

_USUAL: Final = plan_tuning(thorough=False)


@dataclasses.dataclass(frozen=True)
class RealRuns:
    """What is to be run on this machine for a plan, in addition to simulated runs.

    ``loader`` is how the DataLoader is tuned (``None``: it is left out), ``asks_loader``: also
    where the script does not train. ``versus_cpu``: also a few steps on the CPU.
    ``measures_cpu``: the processor next to the GPU is this machine's, whose speed is measured.
    """

    loader: TuningSpec | None = _USUAL
    asks_loader: bool = False
    versus_cpu: bool = False
    measures_cpu: bool = False


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan, and the user's interrupt that ended it early, if one did."""

    result: PlanResult
    interrupt: KeyboardInterrupt | None = None


@dataclasses.dataclass(frozen=True)
class Simulated:
    """What simulated runs tell of a plan, which has no launch line yet; the command's tunables,
    also those that the user has not marked; and the user's interrupt, if one ended the runs."""

    result: PlanResult
    options: CommandOptions
    interrupt: KeyboardInterrupt | None = None


# -- the steps of a plan -------------------------------------------------------------------------


def plan(
    command: Command,
    gpu: GpuSpec,
    settings: Settings,
    real: RealRuns,
    progress: Say = lambda text: None,
    constants: DeviceConstants | None = None,
    keep: Callable[[PlanResult], None] = lambda result: None,
) -> Planned:
    """Plan ``command`` for ``gpu``; what was found before the user's interrupt is a plan, too.

    ``constants`` are what the process takes in addition to PyTorch's memory (the catalogue's).
    ``keep`` is given the plan of the simulated runs before the script runs for real: whatever
    that does to the machine, these need not be repeated.

    Raises :class:`~trainfit.plan.runs.failures.ScriptError` where the script gives nothing to
    plan with, :class:`~trainfit.plan.command.parsing.CommandError` where its placeholder for the
    batch size has no effect, ``KeyboardInterrupt`` where nothing was known by then.
    """
    if real.measures_cpu:
        progress("measuring how fast a core of this machine dispatches operators")
        settings = dataclasses.replace(settings, cpu=measured_cpu(command))
    with WarmProcesses() as warm:
        try:
            found = simulated(command, gpu, settings, progress, constants, warm)
        except ScriptError as error:
            command = with_stand_ins(command, error, progress)
            found = simulated(command, gpu, settings, progress, constants, warm)
        result, options, interrupt = found.result, found.options, found.interrupt
        launched, tuning, limit_s = options.proven_command, real.loader, settings.time_limit_s
        if tuning is not None and not is_tuned(result, command, asked=real.asks_loader):
            tuning = None
        if tuning is not None and result.ranks is not None:
            tuning = dataclasses.replace(tuning, ranks=result.ranks.count // result.ranks.machines)
        if interrupt is None and (real.versus_cpu or tuning is not None):
            keep(with_run_rate(with_launch(result, launched)))
            try:
                if real.versus_cpu:
                    result = with_cpu(result, command, limit_s, progress)
                if tuning is not None:
                    progress("tuning the DataLoader (--no-loader leaves it out)")
                    result, launched, interrupt = tuned(
                        result, options, gpu, limit_s, tuning, progress, warm
                    )
            except KeyboardInterrupt as error:
                interrupt = error
            result = dataclasses.replace(result, interrupted=interrupt is not None)
    return Planned(with_run_rate(with_launch(result, launched)), interrupt)


def simulated(
    command: Command,
    gpu: GpuSpec,
    settings: Settings,
    progress: Say = lambda text: None,
    constants: DeviceConstants | None = None,
    warm: WarmProcesses | None = None,
) -> Simulated:
    """Run ``command`` on the simulated ``gpu``: memory, batch size, precision, remedies, speed.

    ``warm``: what runs are forked from (``None``: each imports PyTorch by itself). After the
    user's interrupt it is the plan of the runs that are over. Raises as :func:`plan` does.
    """
    started = time.monotonic()
    if settings.solve:
        require_named(command, settings.solve)
    known = device_constants(gpu) if constants is None else constants
    with (
        Tracer(
            command,
            gpu,
            steps=settings.steps,
            time_limit_s=settings.time_limit_s,
            constants=constants,
            warm=warm,
            only_training=True,
        ) as tracer,
        Runs(command, tracer, progress) as runs,
    ):
        runs.look_at_samples_s = LOOK_AT_SAMPLES_S[settings.thorough]
        first_run = FirstRun(command, gpu, settings, known, runs, as_progress(progress))
        interrupt = None
        try:
            found = _from_runs(first_run, settings, known)
        except KeyboardInterrupt as error:
            interrupt = error
            runs.only_finished()
            try:
                found = _from_runs(first_run, settings, known)
            except TrainfitError:
                raise interrupt from None
    seconds, early = time.monotonic() - started, interrupt is not None
    result = dataclasses.replace(found.result, seconds=seconds, interrupted=early)
    return dataclasses.replace(found, result=result, interrupt=interrupt)


def _from_runs(first_run: FirstRun, settings: Settings, constants: DeviceConstants) -> Simulated:
    """What the runs give, from the first one to what is recommended; the plan is built once, at
    the end."""
    job, options = first_run.job()
    job = within_epochs(job)
    tunable = tunable_to_size(options.command, job.first.outcome.options, settings.solve)

    # Batch sizes, of the command as it is written.
    flipped = opposite_amp(job)
    job.start_runs(flipped)
    # Other ranks have the batch size that the script gives them.
    batch = job.batch if "batch_size" in job.command.present else None
    start_comparison(job.first, batch, job.runs)
    present = present_setting(job)
    if present.batches.law is not None and present.dtype == "off":
        job.start_pair(flipped)
    start_epoch_end(job, present)

    # Precision, and its batch size.
    others, failed = other_settings(job, present, flipped)
    choice, chosen = chosen_setting(job, present, others, failed)
    ends = epoch_ends(job, confirmed(job, chosen))
    settled = ends.setting
    if settled is not chosen:
        others = [settled if each is chosen else each for each in others]
        present = settled if present is chosen else present
        if choice is not None and choice.configuration is not None:
            choice = dataclasses.replace(choice, configuration=settled.configuration)
        chosen = settled
    if choice is not None and choice.by_hand:
        job.notes.add(choice.by_hand, kind="action")
    note_steps(job, settings.steps)
    note_unused_gpus(job)
    note_batches(job, chosen.batches)

    # Remedies, or what an inference needs.
    remedies, inference = None, None
    if job.infers:
        inference = gradients_both_ways(job)
    else:
        remedies = _remedies(job, present, flipped, settings.remedies)
    note_interrupt(job, present, others, remedies)
    note_context(job.notes, job.first.outcome.context)
    note_absent(job.notes, job.first)
    sizes = None
    if tunable is not None:
        sizes = tunable_sizes(job, tunable, chosen.spec, solves=bool(settings.solve))

    # The samples of an optimizer step.
    others_agree = agreement(job.first, batch, job.runs, ends.run, job.gpu.machines)
    if (larger := _larger_rank(job, present, others_agree)) is not None:
        present = chosen = larger
        choice = None if choice is None or choice.configuration is not None else choice
    kept, options = _accumulation(job, options, chosen)
    note_accumulation(job.notes, kept)
    note_learning(job, chosen.batches)
    launched = _launched_step(job, chosen, kept)
    result = _built(
        job, options.command, settings, constants, present, chosen, others, choice, remedies,
        inference, ends, launched, sizes, others_agree,
    )  # fmt: skip
    return Simulated(result, options)


def _larger_rank(job: PlannedJob, present: AmpSetting, others: Agreement) -> AmpSetting | None:
    """``present`` as the other rank that was simulated has it, where that needs more memory: the
    job fits if all of its ranks do."""
    now = present.configuration
    larger = now if others.other is None else job.of_rank(now, others.other, others.rank)
    if larger is now:
        return None
    need, less = size(larger.memory.device_bytes), size(now.memory.device_bytes)
    job.notes.append(
        f"memory and steps are those of rank {others.rank}, which needs the most of the two "
        f"simulated ({need}, rank 0 {less}); samples are counted as if all had its batches"
    )
    why = f"rank {others.rank} needs {need}, rank 0 {less}, and others were simulated as rank 0"
    return dataclasses.replace(
        present,
        configuration=larger,
        batches=Batches("one trace", why),
        trace=others.other or present.trace,
    )


def _remedies(
    job: PlannedJob, present: AmpSetting, flipped: RunSpec, names: Sequence[str] | None
) -> Remedies | None:
    """The remedies of the job, with what its options can make of it in addition: sequences of
    another length, adapters, weights of 4 bits, a paged optimizer. ``None``: there is nothing to
    try, which needs no run."""
    if not names and (names is not None or present.configuration.fits):
        return None
    options = job.first.outcome.options
    command = with_switches(job.command, options)
    length = length_option(command, options)
    command = command if length is None else length.command
    job.runs.use(command)
    try:
        with_options = dataclasses.replace(job, command=command)
        return try_remedies(with_options, present.batches, flipped, names)
    finally:
        job.runs.use(job.command)


def _launched_step(job: PlannedJob, chosen: AmpSetting, kept: Accumulation) -> StepSpeed | None:
    """The step of the launch command, where that has another number of micro-batches."""
    value, best = kept.values.get("grad_accum"), chosen.batches.recommended
    if value is None or not best:
        return None
    values = {**chosen.spec.values, "grad_accum": value}
    try:
        trace = job.runs.trace(best, dataclasses.replace(chosen.spec, values=values))
        recording = recording_of(trace)
    except (NotSimulated, ScriptError):
        recording = None
    return launched_step(recording, best, int(value), chosen.batches.curve, job.machine)


def _accumulation(
    job: PlannedJob, options: CommandOptions, chosen: AmpSetting
) -> tuple[Accumulation, CommandOptions]:
    """What keeps the effective batch size, by an option that has that effect; and the options
    without one that has not."""
    makeup, best = job.makeup, chosen.batches.recommended
    by_noise = chosen.batches.by_noise
    replicas = replicas_of(job.first)
    kept = accumulation_for(options.command, makeup, job.batch, best, by_noise, replicas)
    value, option = kept.values.get("grad_accum"), options.option("grad_accum")
    if value is not None and job.first.outcome.learning.is_divided is False:
        return Accumulation({}, _summed(value)), options
    if value is None or best is None or option is None or option.is_proven:
        return kept, options
    by_framework = makeup is not None and makeup.loop in FRAMEWORKS
    amp = chosen.spec.values.get("amp")
    why = accumulates(job.runs, best, value, amp, by_framework=by_framework)
    if not why:
        return kept, options.proven(["grad_accum"])
    options = options.without({"grad_accum": why})
    job.runs.use(options.command)
    kept = accumulation_for(options.command, makeup, job.batch, best, by_noise, replicas)
    return kept, options


def _summed(text: str) -> str:
    """What to do where the number of micro-batches may not change."""
    return (
        f"accumulation stays: the losses of micro-batches are added, not averaged, so {text} of "
        "them would be another learning rate; divide the loss by their number to keep the "
        "effective batch size at another one"
    )


# -- the plan --------------------------------------------------------------------------------------


def _built(
    job: PlannedJob,
    command: Command,
    settings: Settings,
    constants: DeviceConstants,
    present: AmpSetting,
    chosen: AmpSetting,
    others: Sequence[AmpSetting],
    choice: AmpChoice | None,
    remedies: Remedies | None,
    inference: Inference | None,
    ends: EpochEnds,
    launched: StepSpeed | None,
    sizes: TunableSizes | None,
    others_agree: Agreement,
) -> PlanResult:
    """The plan of the simulated runs."""
    curve = with_step(chosen.batches.curve, launched)
    first, here, peak = job.first, present.batches, chosen.batches.recommended_peak
    assumptions = dict(job.recording.header["assumptions"])
    gpus = gpus_of_process(job.recording, job.machine, job.memory_model)
    stages = pipeline(chosen.trace.ranks, job.machine, job.memory_model)
    return PlanResult(
        command=command.line(),
        gpu=job.gpu.key,
        gpu_memory_bytes=job.gpu.memory_bytes,
        headroom_share=job.memory_model.headroom,
        headroom_is_set=settings.headroom is not None,
        steps=first.outcome.steps,
        now=present.configuration,
        recommended=job.memory_model.figures(peak) if peak is not None else None,
        other_amp=others[0].configuration if others else None,
        basis=here.basis,
        basis_detail=here.basis_detail,
        launch="",
        assumptions=assumptions,
        notes=tuple(job.notes),
        structured_notes=tuple(complete(job.notes.structured(), (), assumptions)),
        coverage=first.outcome.coverage,
        other_gpus=_other_gpus(job, present, ends.present),
        gpu_sources=dict(job.gpu.sources),
        environment=_environment(first),
        seconds=0.0,
        remedies=remedies,
        inference=inference,
        amp_choice=choice,
        pattern=job.pattern,
        other_processes_bytes=constants.other_processes_bytes,
        profile=constants.profile,
        variables=_variables(command, first, chosen),
        batch_in_command="batch_size" in command.present,
        samples=job.samples,
        speed=stages.speed(
            speed(
                recording_of(chosen.trace),
                present.configuration.batch_size,
                job.machine,
                curve,
                samples=samples_used(first, present.configuration.batch_size),
                calls=job.infers,
            )
        ),
        recordings=job.recorded(here.pair),
        ranks=stages.ranks(ranks_of(recording_of(chosen.trace), job.machine, others_agree.words)),
        gpus=gpus,
        cpu=settings.cpu,
        protection=first.outcome.protection,
        step=job.makeup,
        shapes=job.batch_shapes(),
        batch_check=chosen.batches.check,
        allocator=allocator_trial(command, job.memory_model, chosen),
        loader_at=None if first.outcome.loader is None else first.outcome.loader.where or "",
        sample_loading_s=first.outcome.sample_s,
        findings=_distinct(
            *told_once((*_findings(job, present), *ends.findings), ends.present),
            *of_habits(job.recording.makeup),
            *loops_on_gpu(job.recording),
            *float64_on_gpu(job.recording, job.machine),
            *sampling_before_step(job.recording, job.machine),
            *of_gpus(gpus, present.configuration.step_s, job.gpu.count, job.batch),
            *stages.findings(),
            *others_agree.findings,
            *_strays(job, present, others_agree),
        ),
        epoch_end=ends.present,
        recommended_epoch_end=ends.recommended,
        generation=_generation(job, chosen),
        sizes=sizes,
        script_lines=_script_lines(job, command),
    )


def _generation(job: PlannedJob, chosen: AmpSetting) -> Generation | None:
    """The generation of the text that the script makes; ``None`` where it makes none."""
    batches = chosen.batches
    most = batches.largest or 0
    sizes = {1 << power for power in range(most.bit_length())}
    sizes |= {each for each in (job.batch, batches.recommended, most) if each}
    return generation(
        recording_of(chosen.trace),
        job.machine,
        job.memory_model,
        job.batch,
        batches.law,
        [each for each in sizes if each <= most],
    )


def _script_lines(job: PlannedJob, command: Command) -> dict[str, ScriptLine]:
    """The lines at which the script has what the command does not say."""
    loader = job.first.outcome.loader
    found = script_lines(command, job.batch, loader.sites if loader is not None else ())
    constant = batch_constant(command, job.batch) if loader is None else None
    if constant is not None:
        found["batch_size"] = ScriptLine(constant.place, f"{constant.name} = {{}}")
    return {name: line for name, line in found.items() if name not in command.present}


def _findings(job: PlannedJob, present: AmpSetting) -> tuple[Finding, ...]:
    """What ends the script, what spoils the learning, and what fills the memory: of a job that
    fits, by mistake."""
    outcome = job.first.outcome
    found = (
        *fails_later(job.first, job.command),
        *mistakes_of(job.command, outcome),
        *settings_of(job.command, outcome, job.recording, is_full=not present.configuration.fits),
        *of_learning(outcome.learning),
        *of_evaluation(outcome.coverage),
        *unscaled(present.hazards, outcome),
    )
    recording = recording_of(job.largest)
    shown = job.memory_model.unlimited(Stream.of(recording))
    full = of_full_memory(full_memory(recording, shown))
    if present.configuration.fits:
        full = tuple(each for each in full if each.kind in MISTAKES)
    if all(each.kind != TENSORS_KEPT for each in full):
        graphs_at = job.first.outcome.learning.gradients_with_graph
        growth = Growth.of(job.pattern, job.memory_model)
        full = (*of_steps(job.pattern, growth, graphs_at, known=found), *full)
    return (*found, *full)


def _strays(job: PlannedJob, present: AmpSetting, others: Agreement) -> tuple[Finding, ...]:
    """What another rank puts on rank 0's GPU."""
    other = None if others.other is None else others.other.recording
    now = present.configuration.memory.device_bytes
    return strays(other, others.rank, job.recording, job.memory_model, now)


def _distinct(*findings: Finding) -> tuple[Finding, ...]:
    """Each once, as the memory of an epoch's end may be that of its steps; the worst first."""
    found: list[Finding] = []
    for finding in findings:
        if finding not in found:
            found.append(finding)
    return by_severity(found)


def _variables(command: Command, first: Trace, chosen: AmpSetting) -> dict[str, str]:
    """Accelerate's precision, where it is chosen, or came from trainfit's own environment."""
    if ACCELERATE in chosen.spec.variables:
        return dict(chosen.spec.variables)
    precision = first.outcome.accelerate
    if precision is None or "amp" in command.present or ACCELERATE not in os.environ:
        return {}
    return {} if ACCELERATE in command.environment() else {ACCELERATE: precision}


def _other_gpus(
    job: PlannedJob, present: AmpSetting, evaluation: EpochEnd | None
) -> tuple[str, ...]:
    """GPUs of the catalogue on which the current batch size runs, with its evaluation, smallest
    first; none where it runs on the planned one. They are of its class (for desktops, for data
    centers) where one is large enough; a board with the GPU in its processor is none of either."""
    end = evaluation if evaluation is not None and evaluation.fits is False else None
    if present.configuration.fits and end is None:
        return ()
    need = job.memory_model.shown(Stream.of(recording_of(job.largest)))[0].peak_reserved
    if end is not None:
        need = max(need, (end.device_bytes or 0) - job.memory_model.context_bytes)
    libraries = {part.name for part in job.memory_model.context}
    able = [
        gpu
        for gpu in catalogue()
        if need + total(device_constants(gpu).used(libraries))[0] <= gpu.memory_bytes
    ]
    able = [gpu for gpu in able if not gpu.shared_memory_device or job.gpu.shared_memory_device]
    alike = [gpu for gpu in able if is_of_desktop(gpu) == is_of_desktop(job.gpu)]
    able = sorted(alike or able, key=lambda gpu: (gpu.memory_bytes, gpu.key))
    return tuple(gpu.key for gpu in able)


def _environment(trace: Trace) -> dict[str, str]:
    return {
        "torch": recording_of(trace).header["torch"],
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
