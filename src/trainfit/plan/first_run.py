"""The first runs of a plan: the command as it is written, and what it says of the job."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Final

from trainfit.hardware import GpuSpec
from trainfit.hardware.gpu_topology import assumed_count
from trainfit.memory.capacity import context_parts
from trainfit.memory.replay import Stream
from trainfit.plan.command.file_values import batch_constant
from trainfit.plan.command.parsing import Command
from trainfit.plan.notes import note_first_run, note_options
from trainfit.plan.runs.batches import pairs_of
from trainfit.plan.runs.failures import NotSimulated, is_inference, updates_by_itself
from trainfit.plan.runs.option_proof import proven
from trainfit.plan.runs.options import CommandOptions, observed_settings, read_options
from trainfit.plan.runs.progress import MAY_CHANGE, FirstAnswer, Notes, Progress
from trainfit.plan.runs.runs import Runs
from trainfit.plan.runs.side_by_side import pipeline_of
from trainfit.plan.runs.tracing import Trace, allocator_settings, recording_of
from trainfit.plan.sizing.costing import machine_of, step_seconds
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.plan.sizing.planned_job import PlannedJob, largest_batch_of, planned_job
from trainfit.results.gpus import LIBRARIES, DeviceConstants, Rates
from trainfit.results.plan import HostCpu
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import AS_WRITTEN
from trainfit.speed.step import HostedGpu

#: Seconds for a look at the data set's samples: usually, and for a plan that is to be thorough.
LOOK_AT_SAMPLES_S: Final = {False: 5.0, True: 60.0}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user set: see ``trainfit plan --help``.

    ``headroom`` is a share of the GPU (``None``: up to the prediction interval's upper bound);
    ``steps`` of ``None`` are until memory has settled. ``remedies`` are names of remedies to try;
    ``None``: all where the job does not fit. ``cpu`` is the CPU of the machine with the GPU,
    ``rates`` are what a calibration profile measured, ``noise_scale`` is the gradients', in
    samples. ``rented`` says which machine the GPU is of, in words (empty: none was named).
    ``thorough``: also batch sizes and precisions that do not change the recommendation are
    simulated. ``solve`` is the tunable whose largest value is asked for (empty: none).
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
    solve: str = ""


class FirstRun:
    """Makes the first run of ``command`` on ``gpu``, and tells ``progress`` of it as soon as it is
    known, before other runs show what options mean.

    A script that turns out not to train is run once more, with its calls of the model as steps;
    one that trains without an optimizer is, too, with its backward passes. ``constants`` are the
    GPU's memory outside the allocator.
    """

    def __init__(
        self,
        command: Command,
        gpu: GpuSpec,
        settings: Settings,
        constants: DeviceConstants,
        runs: Runs,
        progress: Progress,
    ) -> None:
        self._command, self._gpu, self._settings = command, gpu, settings
        self._constants, self._runs, self._progress = constants, runs, progress
        self._whole: Trace | None = None
        self._has_answered = False
        runs.early = self._answer_early

    def job(self) -> tuple[PlannedJob, CommandOptions]:
        """The job as its first run shows it, and the command's tunables, those included that the
        user has not marked."""
        first, batch, options = self._made()
        settings, command = self._settings, options.command
        notes, recording = Notes(), recording_of(first)
        note_options(notes, options)
        if command.interpreter.note:
            notes.append(command.interpreter.note)
        for assumed in (settings.rented, assumed_count(self._gpu)):
            if assumed:
                notes.add(assumed, MAY_CHANGE)
        memory_model = self._memory_model(command)
        note_first_run(notes, memory_model, first, self._whole, self._runs.counted)
        memory_model = dataclasses.replace(memory_model, context=context_parts(recording))
        shapes, largest = largest_batch_of(first, batch, self._runs)
        if settings.headroom is None:
            margin = memory_model.margin(recording_of(largest))
            memory_model = dataclasses.replace(memory_model, headroom=margin)
        job = planned_job(
            command,
            self._gpu,
            self._machine(),
            memory_model,
            self._runs,
            notes,
            first,
            batch,
            shapes=shapes,
            largest=largest,
            infers=self._whole is not None,
            noise_scale=settings.noise_scale,
            thorough=settings.thorough,
        )
        return job, options

    # -- the run ---------------------------------------------------------------------------

    def _made(self) -> tuple[Trace, int | None, CommandOptions]:
        """The run, its batch size (``None``: unknown), and what the command's options mean."""
        first = self._once()
        if is_inference(first):
            if self._whole is None:
                self._whole = first
                self._runs.counted = "calls"
                self._runs.forget()
            first = self._once()
        elif first.outcome.steps == 0 and updates_by_itself(first):
            self._runs.counted = "backwards"
            self._runs.forget()
            first = self._once()
        batch, options = self._options(first)
        option = options.option("batch_size")
        if option is not None and option.source == "rows":
            # In the option's unit: what the run told of its samples was in the model's.
            first = self._runs.trace(batch, AS_WRITTEN)
        return first, batch, options

    def _once(self) -> Trace:
        text = self._command.present.get("batch_size")
        batch = None if text is None else int(text)
        self._runs.start(batch, AS_WRITTEN)
        if batch is not None:
            # Most plans need it: it runs meanwhile on the second core.
            self._runs.start(next(pairs_of(batch, None))[1], AS_WRITTEN)
        alone = self._runs.attempt(batch, AS_WRITTEN)
        if not alone.ranks and (ranks := pipeline_of(alone.outcome)):
            self._runs.side_by_side(ranks)
        return self._runs.trace(batch, AS_WRITTEN)

    def _options(self, first: Trace) -> tuple[int | None, CommandOptions]:
        """The batch size, and what varies it: an option that is proven to, or the DataLoader."""
        options = read_options(self._command, first.outcome.options, observed_settings(first))
        marked = self._command.present.get("batch_size")
        option = options.option("batch_size")
        batch = None if option is None else int(option.present)
        loader = first.outcome.loader
        if marked is not None:
            batch = int(marked)
        elif batch is None and loader is not None and loader.index is not None:
            batch = loader.batch_size
        self._answer(recording_of(first), batch)
        if marked is None and batch is not None and (option is None or option.source != "rows"):
            self._runs.same(None, batch, AS_WRITTEN)
        if options.found:
            options = proven(options, self._runs, first, batch, self._gpu)
        if "batch_size" in options.command.present:
            return batch, options
        if loader is None or loader.index is None or loader.batch_size is None:
            return self._constant(first), options
        self._runs.loader_index = loader.index
        self._runs.same(None, loader.batch_size, AS_WRITTEN)
        return loader.batch_size, options

    def _constant(self, first: Trace) -> int | None:
        """The batch size that a constant of the script is, as a run with another value shows."""
        constant = batch_constant(self._command, observed_settings(first).call_batch)
        if constant is None:
            return None
        self._runs.batch_constant = constant.name
        other = next(pairs_of(constant.value, None))[1]
        try:
            batch = observed_settings(self._runs.attempt(other, AS_WRITTEN)).call_batch
        except NotSimulated:
            batch = None
        if batch != other:
            self._runs.drop(other, AS_WRITTEN)
            self._runs.batch_constant = None
            return None
        self._runs.same(None, constant.value, AS_WRITTEN)
        return constant.value

    # -- the first answer ------------------------------------------------------------------

    def _memory_model(self, command: Command) -> MemoryModel:
        return MemoryModel(
            self._gpu,
            allocator_settings(command),
            self._settings.headroom or 0.0,
            self._constants.used(LIBRARIES),
            self._constants.other_processes_bytes,
        )

    def _machine(self) -> HostedGpu:
        settings, profile = self._settings, self._constants.profile
        return machine_of(self._gpu, settings.cpu, settings.rates, profile)

    def _answer_early(self, recording: Recording) -> None:
        """Tell of the job as its second step shows it, while its run goes on."""
        text = self._command.present.get("batch_size")
        # What cannot be told of it yet is told when its run is over.
        with contextlib.suppress(Exception):
            self._answer(recording, None if text is None else int(text))

    def _answer(self, recording: Recording, batch: int | None) -> None:
        """Tell of the job as it is, once, while other runs are still to come."""
        if self._runs.is_over or self._has_answered or not len(recording.alloc_bytes):
            return  # without a tensor on the GPU there is nothing to say that it fits
        context = context_parts(recording)
        memory_model = dataclasses.replace(self._memory_model(self._command), context=context)
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
