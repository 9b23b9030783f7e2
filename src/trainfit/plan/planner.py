"""From a training command to a batch size that fits, with the reasons."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Sequence

from trainfit.hardware import GpuSpec, catalogue, device_constants
from trainfit.memory.breakdown import by_kind, by_module
from trainfit.memory.device import context_parts
from trainfit.memory.fit import LARGEST
from trainfit.memory.growth import step_pattern
from trainfit.memory.replay import Stream
from trainfit.plan.batches import Batches, BatchSizes, most_full, pairs_of
from trainfit.plan.command import Command
from trainfit.plan.failures import ScriptError, is_inference, shortfall
from trainfit.plan.inference import gradients_both_ways
from trainfit.plan.judge import Judge
from trainfit.plan.launch import ACCELERATE, PRECISIONS, launch
from trainfit.plan.remedies import try_remedies
from trainfit.plan.remedy_kinds import NAMES
from trainfit.plan.remedy_trials import Job
from trainfit.plan.runs import AS_WRITTEN, Progress, Runs, Variant
from trainfit.plan.speed import machine_of, speed, step_seconds
from trainfit.plan.tracing import Trace, Tracer, allocator_settings, recording_of
from trainfit.results.constants import LIBRARIES, DeviceConstants, total
from trainfit.results.plan import (
    Configuration,
    HostCpu,
    PlanResult,
    Recorded,
    Remedies,
)
from trainfit.results.profile import Rates
from trainfit.results.recording import Recording
from trainfit.results.words import count
from trainfit.simgpu.settling import LEAST_STEPS


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user set: see ``trainfit plan --help``.

    ``headroom`` is a share of the GPU (``None``: as much as the figures may be too low);
    ``steps`` of ``None`` are until memory has settled.
    ``remedies`` are names of remedies to try; ``None``: all where the job does not fit. ``cpu`` is
    the processor beside the GPU, ``rates`` are what a calibration profile measured,
    ``noise_scale`` is the gradients', in samples.
    """

    headroom: float | None = None
    steps: int | None = None
    time_limit_s: float = 600.0
    remedies: tuple[str, ...] | None = None
    cpu: HostCpu | None = None
    rates: Rates | None = None
    noise_scale: float | None = None


def plan(
    command: Command,
    gpu: GpuSpec,
    gpu_name: str,
    settings: Settings,
    progress: Progress = lambda text: None,
    constants: DeviceConstants | None = None,
) -> PlanResult:
    """Plan ``command`` for ``gpu``; ``gpu_name`` is what the user called it.

    ``constants`` are what the process takes besides PyTorch's memory (the catalogue's).

    Raises :class:`~trainfit.plan.failures.ScriptError` where the script gives nothing to
    plan with, :class:`~trainfit.plan.command.CommandError` where its placeholder for the
    batch size has no effect.
    """
    started = time.monotonic()
    with (
        Tracer(
            command,
            gpu_name,
            gpu_memory_bytes=gpu.memory_bytes,
            steps=settings.steps,
            time_limit_s=settings.time_limit_s,
            constants=constants,
            warm=True,
        ) as tracer,
        Runs(command, tracer, progress) as runs,
    ):
        constants = device_constants(gpu) if constants is None else constants
        result = _Planner(command, gpu, settings, runs, constants).run()
    return dataclasses.replace(result, seconds=time.monotonic() - started)


class _Planner:
    def __init__(
        self,
        command: Command,
        gpu: GpuSpec,
        settings: Settings,
        runs: Runs,
        constants: DeviceConstants,
    ) -> None:
        self._command = command
        self._gpu = gpu
        self._machine = machine_of(gpu, settings.cpu, settings.rates, constants.profile)
        self._settings = settings
        self._runs = runs
        self._constants = constants
        # What the command uses of it is known once it has run.
        self._judge = Judge(
            gpu,
            allocator_settings(command),
            settings.headroom or 0.0,
            constants.used(LIBRARIES),
            constants.other_processes_bytes,
        )
        self._notes: list[str] = []

    def run(self) -> PlanResult:
        first, batch = self._first()
        infers = is_inference(first)
        if infers:
            first, batch = self._counting_calls(first)
        recording = recording_of(first)
        self._judge = dataclasses.replace(self._judge, context=context_parts(recording))
        if self._settings.headroom is None:
            self._judge = dataclasses.replace(self._judge, headroom=self._judge.margin(recording))
        self._notes += recording.header.get("notes", ())
        pairs = list(pairs_of(batch, most_full(first, batch))) if batch is not None else []
        flipped = self._flipped(first)
        self._start(batch, pairs, flipped)
        here = self._batch_sizes().find(first, batch, pairs, AS_WRITTEN, by_trial=True)
        now = self._configure(first, batch, here)
        other = self._other_amp(batch, pairs, flipped)
        self._note_first(first)
        self._note_batches(first, batch, here)
        peak = here.recommended_peak
        remedies = None if infers else self._remedies(batch, now, here, flipped)
        inference = gradients_both_ways(self._runs, self._judge, batch, first) if infers else None
        variables = self._variables(first)
        samples = first.outcome.loader.samples if first.outcome.loader is not None else None
        return PlanResult(
            command=self._command.line(),
            gpu=self._gpu.key,
            gpu_memory_bytes=self._gpu.memory_bytes,
            headroom_share=self._judge.headroom,
            headroom_is_set=self._settings.headroom is not None,
            steps=first.outcome.steps,
            now=now,
            recommended=self._judge.figures(peak) if peak is not None else None,
            other_amp=other,
            basis=here.basis,
            basis_detail=here.basis_detail,
            launch=launch(self._command, self._values(here.recommended), variables).line,
            assumptions=dict(recording_of(first).header["assumptions"]),
            notes=tuple(self._notes),
            other_gpus=() if now.fits else self._other_gpus(first),
            gpu_sources=dict(self._gpu.sources),
            environment=_environment(first),
            seconds=0.0,
            remedies=remedies,
            inference=inference,
            pattern=step_pattern(recording_of(first), reserved_bytes=now.memory.reserved_bytes),
            other_processes_bytes=self._constants.other_processes_bytes,
            profile=self._constants.profile,
            variables=variables,
            batch_in_command="batch_size" in self._command.present,
            samples=samples,
            speed=speed(
                recording,
                batch,
                self._machine,
                here.curve,
                samples=samples,
                calls=infers,
            ),
            recordings=_recorded(batch, recording, here.pair),
            cpu=self._settings.cpu,
        )

    # -- runs ------------------------------------------------------------------------------

    def _first(self) -> tuple[Trace, int | None]:
        """The command as it is, and its batch size: the placeholder's, else the loader's."""
        text = self._command.present.get("batch_size")
        if text is not None:
            batch = int(text)
            self._runs.start(batch, AS_WRITTEN)
            # Most plans need it: it runs meanwhile on the second core.
            self._runs.start(next(pairs_of(batch, None))[1], AS_WRITTEN)
            return self._runs.trace(batch, AS_WRITTEN), batch
        first = self._runs.trace(None, AS_WRITTEN)
        loader = first.outcome.loader
        if loader is None or loader.index is None or loader.batch_size is None:
            return first, None
        self._runs.loader_index = loader.index
        self._runs.same(None, loader.batch_size, AS_WRITTEN)
        return first, loader.batch_size

    def _counting_calls(self, whole: Trace) -> tuple[Trace, int | None]:
        """The first run once more, of a script that does not train: calls are its steps."""
        self._runs.counts_calls = True
        self._runs.forget()
        first, batch = self._first()
        calls = count(first.outcome.steps, "call")
        self._notes.append(f"the script does not train: figures are of {calls} of the model")
        peaks = [self._judge.shown(Stream.of(recording_of(t)))[0] for t in (first, whole)]
        if peaks[1].peak_allocated > peaks[0].peak_allocated:
            all_calls = count(whole.outcome.forward.calls, "call")
            self._notes.append(
                f"over {all_calls} the peak is larger: {peaks[1].peak_allocated} bytes allocated, "
                f"{peaks[1].peak_reserved} reserved"
            )
        return first, batch

    def _flipped(self, first: Trace) -> Variant:
        """The command with autocast the other way round."""
        if self._command.other_amp is not None:
            return Variant(amp=self._command.other_amp)
        return Variant(force="off" if first.outcome.autocast else "on")

    def _start(self, batch: int | None, pairs: Sequence[tuple[int, int]], flipped: Variant) -> None:
        """Begin all runs that a plan without surprises needs."""
        self._runs.start(batch, flipped)
        for variant in (AS_WRITTEN, flipped):
            for each in pairs[0] if pairs else ():
                self._runs.start(each, variant)

    def _batch_sizes(self) -> BatchSizes:
        noise = None if self._runs.counts_calls else self._settings.noise_scale
        return BatchSizes(self._command, self._runs, self._judge, self._machine, self._notes, noise)

    # -- figures ---------------------------------------------------------------------------

    def _configure(self, trace: Trace, batch: int | None, batches: Batches) -> Configuration:
        recording = recording_of(trace)
        stream = Stream.of(recording)
        shown, fits = self._judge.shown(stream)
        return Configuration(
            batch_size=batch,
            amp=trace.outcome.autocast or "off",
            memory=self._judge.figures(shown, context_parts(recording)),
            fits=fits,
            by_kind_bytes=by_kind(recording, stream, shown),
            by_module_bytes=by_module(recording, stream, shown),
            step_peak_allocated_bytes=tuple(peak for peak, _ in shown.step_peaks),
            largest_batch=batches.largest,
            recommended_batch=batches.recommended,
            limits=batches.limits,
            step_s=step_seconds(recording, self._machine),
        )

    def _other_amp(
        self, batch: int | None, pairs: Sequence[tuple[int, int]], flipped: Variant
    ) -> Configuration | None:
        try:
            trace = self._runs.trace(batch, flipped)
        except ScriptError as error:
            self._notes.append(f"AMP the other way round was not simulated: {error}")
            return None
        if flipped.force == "on":
            self._notes.append(
                "AMP on was simulated by torch.autocast around the model's forward calls: the "
                "command has no {amp}"
            )
            self._note_accelerate(batch, trace.outcome.autocast)
        batches = self._batch_sizes().find(trace, batch, pairs, flipped, by_trial=False)
        return self._configure(trace, batch, batches)

    def _remedies(
        self, batch: int | None, now: Configuration, here: Batches, flipped: Variant
    ) -> Remedies | None:
        """What was asked for; of itself where the job does not fit."""
        names = self._settings.remedies
        if names is None:
            names = () if now.fits else NAMES
        if not names:
            return None
        job = Job(
            command=self._command,
            runs=self._runs,
            judge=self._judge,
            batch=batch,
            law=here.law,
            largest=here.largest,
            flipped=flipped,
            machine=self._machine,
        )
        return try_remedies(job, names)

    # -- words -----------------------------------------------------------------------------

    def _values(self, best: int | None) -> dict[str, str]:
        if "batch_size" in self._command.present and best:
            return {"batch_size": str(best)}
        return {}

    def _variables(self, first: Trace) -> dict[str, str]:
        """Accelerate's precision, where it came from trainfit's own environment."""
        precision = first.outcome.accelerate
        if precision is None or "amp" in self._command.present or ACCELERATE not in os.environ:
            return {}
        return {} if ACCELERATE in self._command.environment() else {ACCELERATE: precision}

    def _note_first(self, first: Trace) -> None:
        what = shortfall(first, self._command)
        if what is not None:
            self._notes.insert(0, f"{what}; planned from what it did until then")
            return
        asked = self._settings.steps or LEAST_STEPS
        if first.outcome.status == "ended" and first.outcome.steps < asked:
            what = "call" if self._runs.counts_calls else "optimizer step"
            steps = count(first.outcome.steps, what)
            self._notes.insert(
                0,
                f"the script ended after {steps} of the {asked} asked for"
                + ("; a second step can need more" if first.outcome.steps == 1 else ""),
            )

    def _note_accelerate(self, batch: int | None, dtype: str | None) -> None:
        """AMP on is one variable away where Accelerate asks the environment."""
        precision = PRECISIONS.get(dtype or "")
        if self._runs.trace(batch, AS_WRITTEN).outcome.accelerate == "no" and precision:
            self._notes.append(
                f"{ACCELERATE}={precision} before the command switches AMP on: its Accelerate "
                "asks the environment"
            )

    def _note_batches(self, first: Trace, batch: int | None, here: Batches) -> None:
        best, loader = here.recommended, first.outcome.loader
        if "batch_size" not in self._command.present and best and best != batch:
            where = f" at {loader.where}" if loader is not None and loader.where else ""
            self._notes.append(
                f"the command has no {{batch_size}}: set batch_size={best} for the "
                f"DataLoader{where}, or write the option into the command as "
                f"--batch_size={{batch_size:{batch}}}"
            )
        if here.largest is not None and here.largest >= LARGEST:
            self._notes.append(f"memory sets no limit up to batch size {LARGEST}")
        elif best and loader is not None and loader.samples and best > loader.samples:
            self._notes.append(
                f"the data set has only {loader.samples} samples: no batch is larger than that, "
                "and with drop_last there is none"
            )
        is_used = here.limits is not None and here.limits.trains is not None
        if self._settings.noise_scale is not None and not is_used:
            self._notes.append(
                "--noise-scale changes nothing here: it takes gradients, a batch size that fits, "
                "and step times that are predicted for several"
            )

    def _other_gpus(self, first: Trace) -> tuple[str, ...]:
        """GPUs of the catalogue on which the present batch size runs, smallest first."""
        need = self._judge.unlimited(Stream.of(recording_of(first))).peak_reserved
        libraries = {part.name for part in self._judge.context}
        able = [
            gpu
            for gpu in catalogue()
            if need + total(device_constants(gpu).used(libraries))[0] <= gpu.memory_bytes
        ]
        able.sort(key=lambda gpu: (gpu.memory_bytes, gpu.key))
        return tuple(gpu.key for gpu in able)


def _recorded(
    batch: int | None, recording: Recording, others: Sequence[tuple[int, Recording]]
) -> tuple[Recorded, ...]:
    """The job as it is, and the other batch sizes that its law is from."""
    kept = [Recorded.of(batch, recording)]
    return (*kept, *(Recorded.of(at, other) for at, other in others if at != batch))


def _environment(trace: Trace) -> dict[str, str]:
    return {
        "torch": str(recording_of(trace).header["torch"]),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
