"""The job that is planned, as its first run shows it: what every later step of a plan needs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Final

from trainfit.hardware import GpuSpec
from trainfit.memory.capacity import context_parts
from trainfit.memory.growth import step_pattern
from trainfit.memory.peak import by_kind, by_module, most_kept_bytes
from trainfit.memory.replay import Stream, replay
from trainfit.plan.command.parsing import Command
from trainfit.plan.runs.batches import VaryingShapes, most_full, pairs_of, unit_of, varying_shapes
from trainfit.plan.runs.failures import ScriptError
from trainfit.plan.runs.progress import Notes
from trainfit.plan.runs.runs import Runs
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.plan.sizing.batch_sizes import BatchSizes
from trainfit.plan.sizing.costing import step_seconds
from trainfit.plan.sizing.memory_model import Batches, Growth, MemoryModel
from trainfit.results.configuration import BatchLimits, BatchShapes, Configuration
from trainfit.results.plan import Recorded
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import AS_WRITTEN, RunSpec
from trainfit.results.runs.steps import StepMakeup, StepPattern
from trainfit.results.text import size
from trainfit.speed.step import HostedGpu

#: Times the memory of rank 0 up to which another rank's, of fewer steps, is the same.
_SAME: Final = 1.05


@dataclasses.dataclass(frozen=True)
class PlannedJob:
    """A command on a GPU, with ``first``, its run as it is written, at ``batch`` samples (``None``:
    not known), and ``largest``, the one that memory is judged by: with the data set's largest batch
    where batches vary in shape and it could be simulated, else ``first``.

    ``memory_model`` knows what the job's process uses of the GPU; steps are costed on ``machine``.
    ``infers``: steps are calls of the model, because the script does not train. ``noise_scale`` is
    the gradients', in samples, as the user said. ``pattern`` says how memory goes on, ``shapes``
    what stands for batches that vary in shape (``None``: they do not), ``pairs`` the pairs of batch
    sizes to derive a law from. ``notes`` collects what is to be said. ``thorough``: also what does
    not change the recommendation is simulated.
    """

    command: Command
    gpu: GpuSpec
    machine: HostedGpu
    memory_model: MemoryModel
    runs: Runs
    notes: Notes
    first: Trace
    largest: Trace
    batch: int | None
    infers: bool
    noise_scale: float | None
    pattern: StepPattern
    shapes: VaryingShapes | None
    pairs: tuple[tuple[int, int], ...]
    thorough: bool = True

    @property
    def recording(self) -> Recording:
        """The recording of the first run."""
        return recording_of(self.first)

    @functools.cached_property
    def too_large(self) -> str:
        """Why it fits at no batch size, and with no precision of autocast: what it keeps whatever
        its batches are is larger than the GPU. Empty where that is not so."""
        kept = most_kept_bytes(recording_of(self.largest))
        model = self.memory_model
        if self.infers or kept <= model.capacity_bytes - model.context_bytes:
            return ""
        return (
            f"weights, gradients and optimizer state alone need {size(kept)}, at any batch size "
            "and precision of autocast"
        )

    @property
    def makeup(self) -> StepMakeup | None:
        """The makeup of a step, with what runs at other batch sizes say of it."""
        return self.runs.with_evidence(self.batch, self.recording.makeup)

    @property
    def samples(self) -> int | None:
        """The samples of an epoch; ``None`` where they are not known."""
        loader = self.first.outcome.loader
        return loader.epoch_samples if loader is not None else None

    def batches(self, trace: Trace, spec: RunSpec, *, by_trial: bool) -> Batches:
        """What is known of other batch sizes of ``spec``; ``trace`` is its run at ``batch``."""
        if self.too_large:
            limits = BatchLimits(None, None, data_set=self.samples, reason=self.too_large)
            return Batches("one trace", self.too_large, largest=0, limits=limits)
        return self.batch_sizes().find(trace, self.batch, self.pairs, spec, by_trial=by_trial)

    def batch_sizes(self) -> BatchSizes:
        """What looks for other batch sizes of this job."""
        return BatchSizes(
            self.command,
            self.runs,
            self.memory_model,
            self.machine,
            self.notes,
            None if self.infers else self.noise_scale,
            Growth.of(self.pattern, self.memory_model),
            self.shapes,
            thorough=self.thorough,
            infers=self.infers,
            unit=self.unit,
        )

    @property
    def unit(self) -> int:
        """What a batch size has to be a multiple of."""
        return unit_of(self.first, self.batch)

    def sized(self, spec: RunSpec) -> RunSpec:
        """``spec`` for runs that tell memory: with the largest batch, where batches vary."""
        return spec if self.shapes is None else self.shapes.sized(spec)

    def configuration(self, trace: Trace, batches: Batches, spec: RunSpec) -> Configuration:
        """What a run of ``spec`` at ``batch`` needs, with what is known of other batch sizes."""
        recording = recording_of(self._largest_of(trace, spec))
        stream = Stream.of(recording)
        shown, fits = self.memory_model.shown(stream)
        return Configuration(
            batch_size=self.batch,
            amp=trace.outcome.half or "off",
            by_fsdp=trace.outcome.autocast is None and bool(trace.outcome.amp.fsdp),
            memory=self.memory_model.figures(shown, context_parts(recording)),
            fits=fits,
            by_kind_bytes=by_kind(recording, stream, shown),
            by_module_bytes=by_module(recording, stream, shown),
            step_peak_allocated_bytes=tuple(peak for peak, _ in shown.step_peaks),
            largest_batch=batches.largest,
            recommended_batch=batches.recommended,
            limits=batches.limits,
            step_s=step_seconds(recording_of(trace), self.machine),
        )

    def of_rank(self, now: Configuration, other: Trace, rank: int) -> Configuration:
        """``now`` with the memory of another rank's run, whose batch sizes are not known; as it is
        where that rank needs no more."""
        recording = other.recording
        if recording is None or not recording.steps:
            return now
        stream = Stream.of(recording)
        shown, fits = self.memory_model.shown(stream)
        memory = self.memory_model.figures(shown, context_parts(recording))
        if memory.allocated_bytes <= _SAME * now.memory.allocated_bytes:
            return now
        loader = other.outcome.loader
        return dataclasses.replace(
            now,
            rank=rank,
            batch_size=None if loader is None else loader.batch_size,
            step_s=step_seconds(recording, self.machine),
            memory=memory,
            fits=fits,
            by_kind_bytes=by_kind(recording, stream, shown),
            by_module_bytes=by_module(recording, stream, shown),
            step_peak_allocated_bytes=tuple(peak for peak, _ in shown.step_peaks),
            largest_batch=None,
            recommended_batch=None,
            limits=None,
        )

    def _largest_of(self, trace: Trace, spec: RunSpec) -> Trace:
        """The run of ``spec`` with the largest batch; ``trace``, with batches as they come, if
        there is none, or where sizes that change from step to step reserve more."""
        if self.sized(spec) == spec:
            return trace
        try:
            largest = self.runs.trace(self.batch, self.sized(spec))
        except ScriptError as error:
            self.notes.append(f"memory with the largest batch is not known: {error.in_note}")
            return trace
        return max(largest, trace, key=self._reserved_bytes)

    def _reserved_bytes(self, trace: Trace) -> int:
        return self.memory_model.shown(Stream.of(recording_of(trace)))[0].peak_reserved

    def start_runs(self, flipped: RunSpec) -> None:
        """Begin the runs that a plan without surprises needs first."""
        if self.too_large:
            return
        self.runs.start(self.batch, flipped)
        self.start_pair(AS_WRITTEN)

    def start_pair(self, spec: RunSpec) -> None:
        """Begin the runs that a rule for other batch sizes is from."""
        if self.shapes is not None and self.shapes.matter and self.shapes.longest is None:
            return
        for each in self.pairs[0] if self.pairs else ():
            self.runs.start(each, self.sized(spec))

    def recorded(self, others: tuple[tuple[int, Recording], ...]) -> tuple[Recorded, ...]:
        """The job as other GPUs are judged by it, and the other batch sizes that its law is from;
        where batches vary in shape, its run with the longest."""
        kept = Recorded.of(self.batch, recording_of(self.largest))
        return (kept, *(Recorded.of(at, other) for at, other in others if at != self.batch))

    def batch_shapes(self) -> BatchShapes | None:
        """What batches of the longest sample need, where batches vary in shape."""
        if self.shapes is None:
            return None
        scan = self.shapes.scan
        found = BatchShapes(
            looked_at=scan.looked_at or None,
            samples=scan.samples,
            median_elements=scan.typical_elements or None,
            longest_elements=scan.longest_elements or None,
            typical_step_s=step_seconds(self.recording, self.machine),
            reason=self.shapes.reason,
        )
        if self.shapes.longest is None:
            return found
        longest = recording_of(self.largest)
        shown, fits = self.memory_model.shown(Stream.of(longest))
        return dataclasses.replace(
            found,
            longest=self.memory_model.figures(shown, context_parts(longest)),
            longest_fits=fits,
            longest_step_s=step_seconds(longest, self.machine),
        )


#: A peak that is larger by less is the same: what varies in the samples does not matter to memory.
_ALIKE: Final = 0.02


def largest_batch_of(
    first: Trace, batch: int | None, runs: Runs
) -> tuple[VaryingShapes | None, Trace]:
    """What stands for all batches where they vary in shape, and the run that memory is judged by:
    with the largest batch, else ``first``."""
    shapes = varying_shapes(first)
    if shapes is None or shapes.longest is None:
        return shapes, first
    try:
        trace = runs.trace(batch, shapes.sized(AS_WRITTEN))
    except ScriptError as error:
        return shapes.without(f"the largest could not be simulated: {error.in_note}"), first
    peaks = [replay(Stream.of(recording_of(each))).peak_allocated for each in (first, trace)]
    if not shapes.is_seen and peaks[1] <= (1 + _ALIKE) * peaks[0]:
        # The names of files, for one.
        return (None if shapes.scan.tells_all else shapes.without("")), first
    return shapes, trace


def planned_job(
    command: Command,
    gpu: GpuSpec,
    machine: HostedGpu,
    memory_model: MemoryModel,
    runs: Runs,
    notes: Notes,
    first: Trace,
    batch: int | None,
    *,
    shapes: VaryingShapes | None,
    largest: Trace,
    infers: bool,
    noise_scale: float | None,
    thorough: bool,
) -> PlannedJob:
    """What the first run says of the job; see :class:`PlannedJob`."""
    peak = memory_model.shown(Stream.of(recording_of(largest)))[0].peak_reserved
    gpus = max(len(Stream.of(recording_of(first)).gpus), unit_of(first, batch))
    pairs = pairs_of(batch, most_full(first, batch), gpus) if batch is not None else ()
    return PlannedJob(
        command,
        gpu,
        machine,
        memory_model,
        runs,
        notes,
        first,
        largest,
        batch,
        infers,
        noise_scale,
        step_pattern(recording_of(largest), reserved_bytes=peak),
        shapes,
        tuple(pairs),
        thorough,
    )
