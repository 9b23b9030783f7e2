"""What simulated runs of a training command tell: which batch sizes fit, the best, and why."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import time
from collections.abc import Callable

from trainfit.hardware import GpuSpec, catalogue, device_constants
from trainfit.memory.capacity import context_parts
from trainfit.memory.replay import Stream
from trainfit.plan.changes.amp import AmpSetting
from trainfit.plan.changes.amp_settings import (
    chosen_setting,
    opposite_amp,
    other_settings,
    present_setting,
)
from trainfit.plan.changes.catalogue import NAMES
from trainfit.plan.changes.remedies import try_remedies
from trainfit.plan.changes.trials import Job, allocator_trial
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.wrappers import ACCELERATE
from trainfit.plan.confirmation import confirmed
from trainfit.plan.notes import (
    note_accumulation,
    note_batches,
    note_first_run,
    note_interrupt,
    note_learning,
    note_options,
    note_steps,
)
from trainfit.plan.remainder import note_remainder
from trainfit.plan.runs.failures import NotSimulated, what_happened
from trainfit.plan.runs.option_proof import FirstRun, accumulates
from trainfit.plan.runs.options import CommandOptions
from trainfit.plan.runs.processes import WarmProcesses
from trainfit.plan.runs.progress import MAY_CHANGE, FirstAnswer, Notes, Progress, as_progress
from trainfit.plan.runs.runs import Runs
from trainfit.plan.runs.tracing import Trace, Tracer, allocator_settings, recording_of
from trainfit.plan.sizing.costing import machine_of, step_seconds
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.plan.sizing.planned_job import PlannedJob, planned_job
from trainfit.plan.sizing.recommendation import Accumulation, accumulation_for
from trainfit.plan.sizing.speed import speed
from trainfit.results.changes import Remedies
from trainfit.results.files.contents import complete
from trainfit.results.files.errors import TrainfitError
from trainfit.results.gpus import LIBRARIES, DeviceConstants, Rates, total
from trainfit.results.memory import MemoryFigures
from trainfit.results.plan import HostCpu, Inference, PlanResult
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import RunSpec
from trainfit.results.runs.trace import InterventionRequest
from trainfit.speed.step import Machine

# ---
# Scripts that do not train: what they need with gradients recorded, and without.


def gradients_both_ways(
    runs: Runs, memory_model: MemoryModel, batch: int | None, first: Trace
) -> Inference:
    """The memory of ``first``, and of the same with gradients the other way round."""
    records = first.outcome.forward.with_grad > 0
    request = InterventionRequest("forward-grad", ("off" if records else "on",))
    title = "gradients off" if records else "gradients on"
    mine, others, failure = _figures(memory_model, first), None, ""
    try:
        other = runs.attempt(batch, RunSpec(interventions=(request,), title=title))
    except NotSimulated as error:
        return _inference(records, mine, None, str(error))
    if other.recording is not None and other.outcome.steps >= first.outcome.steps:
        others = _figures(memory_model, other)
    else:
        failure = what_happened(other.outcome)
    return _inference(records, mine, others, failure)


def _inference(
    records: bool, mine: MemoryFigures, others: MemoryFigures | None, failure: str
) -> Inference:
    return Inference(
        records_gradients=records,
        without_gradients=others if records else mine,
        with_gradients=mine if records else others,
        failure=failure,
    )


def _figures(memory_model: MemoryModel, trace: Trace) -> MemoryFigures:
    assert trace.recording is not None
    return memory_model.figures(memory_model.shown(Stream.of(trace.recording))[0])


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user set: see ``trainfit plan --help``.

    ``headroom`` is a share of the GPU (``None``: up to the prediction interval's upper bound);
    ``steps`` of ``None`` are until memory has settled. ``remedies`` are names of remedies to try;
    ``None``: all where the job does not fit. ``cpu`` is the CPU of the machine with the GPU,
    ``rates`` are what a calibration profile measured, ``noise_scale`` is the gradients', in
    samples. ``rented`` says which machine the GPU is of, in words (empty: none was named).
    ``thorough``: also batch sizes and precisions that do not change the recommendation are
    simulated.
    """

    headroom: float | None = None
    steps: int | None = None
    time_limit_s: float = 600.0
    remedies: tuple[str, ...] | None = None
    cpu: HostCpu | None = None
    rates: Rates | None = None
    noise_scale: float | None = None
    rented: str = ""
    thorough: bool = False


@dataclasses.dataclass(frozen=True)
class Simulated:
    """What simulated runs tell of a plan, which has no launch line yet; the command's tunables,
    also those that the user has not marked; and the user's interrupt, if one ended the runs."""

    result: PlanResult
    options: CommandOptions
    interrupt: KeyboardInterrupt | None = None


def simulated(
    command: Command,
    gpu: GpuSpec,
    settings: Settings,
    progress: Callable[[str], None] = lambda text: None,
    constants: DeviceConstants | None = None,
    warm: WarmProcesses | None = None,
) -> Simulated:
    """Run ``command`` on the simulated ``gpu``: memory, batch size, precision, remedies, speed.

    ``constants`` are what the process takes in addition to PyTorch's memory (the catalogue's).
    ``warm``: what runs are forked from (``None``: each imports PyTorch by itself).

    Raises :class:`~trainfit.plan.runs.failures.ScriptError` where the script gives nothing to
    plan with, :class:`~trainfit.plan.command.parsing.CommandError` where its placeholder for the
    batch size has no effect, ``KeyboardInterrupt`` where nothing was known by then.
    """
    started = time.monotonic()
    with (
        Tracer(
            command,
            gpu,
            steps=settings.steps,
            time_limit_s=settings.time_limit_s,
            constants=constants,
            warm=warm,
        ) as tracer,
        Runs(command, tracer, progress) as runs,
    ):
        constants = device_constants(gpu) if constants is None else constants
        planner = _Planner(command, gpu, settings, runs, constants, as_progress(progress))
        interrupt = None
        try:
            result = planner.run()
        except KeyboardInterrupt as error:
            interrupt = error
            result = planner.so_far(error)
    result = dataclasses.replace(result, seconds=time.monotonic() - started)
    return Simulated(result, planner.options, interrupt)


class _Planner:
    """What makes the plan; once more after an interrupt, from the runs that are over."""

    def __init__(
        self,
        command: Command,
        gpu: GpuSpec,
        settings: Settings,
        runs: Runs,
        constants: DeviceConstants,
        progress: Progress,
    ) -> None:
        self._command = command
        self._gpu = gpu
        self._settings = settings
        self._runs = runs
        self._constants = constants
        self._progress = progress
        self._first_run = FirstRun(command, runs, gpu, self._answer)
        self._has_answered = False
        self._runs.early = self._early_answer
        self.options = CommandOptions(command, command)

    def so_far(self, interrupt: KeyboardInterrupt) -> PlanResult:
        """The plan from the runs that are over; raises ``interrupt`` where that is too little."""
        self._runs.only_finished()
        try:
            result = self.run()
        except TrainfitError:
            raise interrupt from None
        return dataclasses.replace(result, interrupted=True)

    def run(self) -> PlanResult:
        """From the first run to what is recommended."""
        job = self._job()
        flipped = opposite_amp(job)
        job.start_runs(flipped)
        present = present_setting(job)
        if present.batches.law is not None:
            job.start_pair(flipped)
        others, failed = other_settings(job, present, flipped)
        choice, chosen = chosen_setting(job, present, others, failed)
        settled = confirmed(job, chosen)
        if settled is not chosen:
            others = [settled if each is chosen else each for each in others]
            present = settled if present is chosen else present
            if choice is not None and choice.configuration is not None:
                choice = dataclasses.replace(choice, configuration=settled.configuration)
            chosen = settled
        if choice is not None and choice.by_hand:
            job.notes.add(choice.by_hand, kind="action")
        note_steps(job, self._settings.steps)
        note_batches(job, chosen.batches)
        note_remainder(job, chosen.batches, chosen.spec)
        remedies = None if job.infers else self._remedies(job, present, flipped)
        inference = (
            gradients_both_ways(self._runs, job.memory_model, job.batch, job.first)
            if job.infers
            else None
        )
        note_interrupt(job, present, others, remedies)
        kept = self._accumulation(job, chosen)
        note_accumulation(job.notes, kept)
        note_learning(job, chosen.batches)
        return dataclasses.replace(
            self._result(job, present, chosen),
            other_amp=others[0].configuration if others else None,
            remedies=remedies,
            inference=inference,
            amp_choice=choice,
        )

    def _job(self) -> PlannedJob:
        """The command as it is written, and what its process uses of the GPU."""
        first, batch = self._first_run.make()
        self.options = self._first_run.options
        self._command = self.options.command
        notes, whole = Notes(), self._first_run.whole
        note_options(notes, self.options)
        if self._command.interpreter.note:
            notes.append(self._command.interpreter.note)
        if self._settings.rented:
            notes.add(self._settings.rented, MAY_CHANGE)
        memory_model = self._memory_model()
        note_first_run(notes, memory_model, first, whole, self._runs.counted)
        recording = recording_of(first)
        memory_model = dataclasses.replace(memory_model, context=context_parts(recording))
        if self._settings.headroom is None:
            memory_model = dataclasses.replace(
                memory_model, headroom=memory_model.margin(recording)
            )
        settings = self._settings
        return planned_job(
            self._command,
            self._gpu,
            self._machine(),
            memory_model,
            self._runs,
            notes,
            first,
            batch,
            infers=whole is not None,
            noise_scale=settings.noise_scale,
            thorough=settings.thorough,
        )

    def _memory_model(self) -> MemoryModel:
        return MemoryModel(
            self._gpu,
            allocator_settings(self._command),
            self._settings.headroom or 0.0,
            self._constants.used(LIBRARIES),
            self._constants.other_processes_bytes,
        )

    def _machine(self) -> Machine:
        settings, profile = self._settings, self._constants.profile
        return machine_of(self._gpu, settings.cpu, settings.rates, profile)

    def _early_answer(self, recording: Recording) -> None:
        """Tell of the job as its second step shows it, while its run goes on."""
        text = self._command.present.get("batch_size")
        # What cannot be told of it yet is told when its run is over.
        with contextlib.suppress(Exception):
            self._tell(recording, None if text is None else int(text))

    def _answer(self, first: Trace, batch: int | None) -> None:
        """Tell of the job as it is, while other runs are still to come."""
        self._tell(recording_of(first), batch)

    def _tell(self, recording: Recording, batch: int | None) -> None:
        if self._runs.is_over or self._has_answered:
            return
        context = context_parts(recording)
        memory_model = dataclasses.replace(self._memory_model(), context=context)
        shown, fits = memory_model.shown(Stream.of(recording))
        self._progress.first_answer(
            FirstAnswer(
                batch_size=batch,
                fits=fits,
                device_bytes=memory_model.figures(shown, context).device_bytes,
                capacity_bytes=self._gpu.memory_bytes,
                step_s=step_seconds(recording, self._machine()),
            )
        )
        self._has_answered = True

    def _accumulation(self, job: PlannedJob, chosen: AmpSetting) -> Accumulation:
        """What keeps the effective batch size, by an option that has that effect."""
        makeup, best = job.recording.makeup, chosen.batches.recommended
        by_noise = chosen.batches.by_noise
        kept = accumulation_for(self._command, makeup, job.batch, best, by_noise)
        wanted, option = kept.values.get("grad_accum"), self.options.option("grad_accum")
        if wanted is None or best is None or option is None or option.is_proven:
            return kept
        why = accumulates(self._runs, best, wanted, chosen.spec.values.get("amp"))
        if not why:
            self.options = self.options.proven(["grad_accum"])
            return kept
        self.options = self.options.without({"grad_accum": why})
        self._command = self.options.command
        self._runs.use(self._command)
        return accumulation_for(self._command, makeup, job.batch, best, by_noise)

    def _remedies(self, job: PlannedJob, present: AmpSetting, flipped: RunSpec) -> Remedies | None:
        """The remedies to try: those asked for, or all if the job does not fit."""
        names = self._settings.remedies
        if names is None:
            names = () if present.configuration.fits else NAMES
        if not names:
            return None
        planned = Job(
            command=self._command,
            runs=self._runs,
            memory_model=job.memory_model,
            batch=job.batch,
            law=present.batches.law,
            largest=present.batches.largest,
            flipped=flipped,
            machine=job.machine,
        )
        return try_remedies(planned, names)

    def _result(self, job: PlannedJob, present: AmpSetting, chosen: AmpSetting) -> PlanResult:
        """The plan, but for the other settings, remedies, inference and launch line."""
        first, here, peak = job.first, present.batches, chosen.batches.recommended_peak
        assumptions = dict(job.recording.header["assumptions"])
        return PlanResult(
            command=self._command.line(),
            gpu=self._gpu.key,
            gpu_memory_bytes=self._gpu.memory_bytes,
            headroom_share=job.memory_model.headroom,
            headroom_is_set=self._settings.headroom is not None,
            steps=first.outcome.steps,
            now=present.configuration,
            recommended=job.memory_model.figures(peak) if peak is not None else None,
            other_amp=None,
            basis=here.basis,
            basis_detail=here.basis_detail,
            launch="",
            assumptions=assumptions,
            notes=tuple(job.notes),
            structured_notes=tuple(complete(job.notes.structured(), (), assumptions)),
            coverage=first.outcome.coverage,
            other_gpus=() if present.configuration.fits else _other_gpus(job),
            gpu_sources=dict(self._gpu.sources),
            environment=_environment(first),
            seconds=0.0,
            pattern=job.pattern,
            other_processes_bytes=self._constants.other_processes_bytes,
            profile=self._constants.profile,
            variables=_variables(self._command, first, chosen),
            batch_in_command="batch_size" in self._command.present,
            samples=job.samples,
            speed=speed(
                recording_of(chosen.trace),
                job.batch,
                job.machine,
                chosen.batches.curve,
                samples=job.samples,
                calls=job.infers,
            ),
            recordings=job.recorded(here.pair),
            cpu=self._settings.cpu,
            protection=first.outcome.protection,
            step=job.recording.makeup,
            shapes=job.batch_shapes(),
            batch_check=chosen.batches.check,
            allocator=allocator_trial(self._command, job.memory_model, chosen),
            loader_at=None if first.outcome.loader is None else first.outcome.loader.where or "",
            sample_loading_s=first.outcome.sample_s,
        )


def _variables(command: Command, first: Trace, chosen: AmpSetting) -> dict[str, str]:
    """Accelerate's precision, where it is chosen, or came from trainfit's own environment."""
    if ACCELERATE in chosen.spec.variables:
        return dict(chosen.spec.variables)
    precision = first.outcome.accelerate
    if precision is None or "amp" in command.present or ACCELERATE not in os.environ:
        return {}
    return {} if ACCELERATE in command.environment() else {ACCELERATE: precision}


def _other_gpus(job: PlannedJob) -> tuple[str, ...]:
    """GPUs of the catalogue on which the current batch size runs, smallest first."""
    need = job.memory_model.unlimited(Stream.of(job.recording)).peak_reserved
    libraries = {part.name for part in job.memory_model.context}
    able = [
        gpu
        for gpu in catalogue()
        if need + total(device_constants(gpu).used(libraries))[0] <= gpu.memory_bytes
    ]
    able.sort(key=lambda gpu: (gpu.memory_bytes, gpu.key))
    return tuple(gpu.key for gpu in able)


def _environment(trace: Trace) -> dict[str, str]:
    return {
        "torch": str(recording_of(trace).header["torch"]),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
