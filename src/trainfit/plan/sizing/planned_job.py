"""The job that is planned, as its first run shows it: what every later step of a plan needs."""

from __future__ import annotations

import dataclasses

from trainfit.hardware import GpuSpec
from trainfit.memory.capacity import context_parts
from trainfit.memory.growth import step_pattern
from trainfit.memory.peak import by_kind, by_module
from trainfit.memory.replay import Stream
from trainfit.plan.command.parsing import Command
from trainfit.plan.runs.batches import VaryingShapes, most_full, pairs_of, varying_shapes
from trainfit.plan.runs.failures import ScriptError
from trainfit.plan.runs.progress import Notes
from trainfit.plan.runs.runs import Runs
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.plan.sizing.batch_sizes import BatchSizes
from trainfit.plan.sizing.costing import step_seconds
from trainfit.plan.sizing.laws import Batches
from trainfit.plan.sizing.memory_model import Growth, MemoryModel
from trainfit.results.configuration import BatchShapes, Configuration
from trainfit.results.plan import Recorded
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import AS_WRITTEN, RunSpec
from trainfit.results.runs.steps import StepPattern
from trainfit.speed.step import Machine


@dataclasses.dataclass(frozen=True)
class PlannedJob:
    """A command on a GPU, with ``first``, its run as it is written, at ``batch`` samples (``None``:
    not known).

    ``memory_model`` knows what the job's process uses of the GPU; steps are costed on ``machine``.
    ``infers``: steps are calls of the model, because the script does not train. ``noise_scale`` is
    the gradients', in samples, as the user said. ``pattern`` says how memory goes on, ``shapes``
    what stands for batches that vary in shape (``None``: they do not), ``pairs`` the pairs of batch
    sizes to derive a law from. ``notes`` collects what is to be said. ``thorough``: also what does
    not change the recommendation is simulated.
    """

    command: Command
    gpu: GpuSpec
    machine: Machine
    memory_model: MemoryModel
    runs: Runs
    notes: Notes
    first: Trace
    batch: int | None
    infers: bool
    noise_scale: float | None
    pattern: StepPattern
    shapes: VaryingShapes | None
    pairs: tuple[tuple[int, int], ...]
    thorough: bool = True

    @property
    def recording(self) -> Recording:
        """Of the first run."""
        return recording_of(self.first)

    @property
    def samples(self) -> int | None:
        """Of an epoch; ``None`` where they are not known."""
        loader = self.first.outcome.loader
        return loader.samples if loader is not None else None

    def batches(self, trace: Trace, spec: RunSpec, *, by_trial: bool) -> Batches:
        """What is known of other batch sizes of ``spec``; ``trace`` is its run at ``batch``."""
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
        )

    def configuration(self, trace: Trace, batches: Batches) -> Configuration:
        """What a run at ``batch`` needs, with what is known of other batch sizes."""
        recording = recording_of(trace)
        stream = Stream.of(recording)
        shown, fits = self.memory_model.shown(stream)
        return Configuration(
            batch_size=self.batch,
            amp=trace.outcome.autocast or "off",
            memory=self.memory_model.figures(shown, context_parts(recording)),
            fits=fits,
            by_kind_bytes=by_kind(recording, stream, shown),
            by_module_bytes=by_module(recording, stream, shown),
            step_peak_allocated_bytes=tuple(peak for peak, _ in shown.step_peaks),
            largest_batch=batches.largest,
            recommended_batch=batches.recommended,
            limits=batches.limits,
            step_s=step_seconds(recording, self.machine),
        )

    def start_runs(self, flipped: RunSpec) -> None:
        """Begin the runs that a plan without surprises needs first."""
        self.runs.start(self.batch, flipped)
        self.start_pair(AS_WRITTEN)

    def start_pair(self, spec: RunSpec) -> None:
        """Begin the runs that a rule for other batch sizes is from."""
        if self.shapes is not None and self.shapes.longest is None:
            return
        sized = spec if self.shapes is None else self.shapes.sized(spec)
        for each in self.pairs[0] if self.pairs else ():
            self.runs.start(each, sized)

    def recorded(self, others: tuple[tuple[int, Recording], ...]) -> tuple[Recorded, ...]:
        """The job as other GPUs are judged by it, and the other batch sizes that its law is from;
        where batches vary in shape, its run with the longest."""
        trace = self._longest()
        kept = Recorded.of(self.batch, self.recording if trace is None else recording_of(trace))
        return (kept, *(Recorded.of(at, other) for at, other in others if at != self.batch))

    def batch_shapes(self) -> BatchShapes | None:
        """What batches of the longest sample need, where batches vary in shape."""
        if self.shapes is None:
            return None
        scan, trace = self.shapes.scan, self._longest()
        found = BatchShapes(
            looked_at=scan.looked_at or None,
            samples=scan.samples,
            median_elements=scan.typical_elements or None,
            longest_elements=scan.longest_elements or None,
            typical_step_s=step_seconds(self.recording, self.machine),
            reason=self.shapes.reason,
        )
        if trace is None:
            return found
        longest = recording_of(trace)
        shown, fits = self.memory_model.shown(Stream.of(longest))
        return dataclasses.replace(
            found,
            longest=self.memory_model.figures(shown, context_parts(longest)),
            longest_fits=fits,
            longest_step_s=step_seconds(longest, self.machine),
        )

    def _longest(self) -> Trace | None:
        """The run whose batches are all of the longest sample; ``None`` where there is none."""
        if self.shapes is None or self.shapes.longest is None or self.batch is None:
            return None
        try:
            return self.runs.trace(self.batch, self.shapes.sized(AS_WRITTEN))
        except ScriptError:
            return None  # was noted


def planned_job(
    command: Command,
    gpu: GpuSpec,
    machine: Machine,
    memory_model: MemoryModel,
    runs: Runs,
    notes: Notes,
    first: Trace,
    batch: int | None,
    *,
    infers: bool,
    noise_scale: float | None,
    thorough: bool,
) -> PlannedJob:
    """What the first run says of the job; see :class:`PlannedJob`."""
    peak = memory_model.shown(Stream.of(recording_of(first)))[0].peak_reserved
    pairs = pairs_of(batch, most_full(first, batch)) if batch is not None else ()
    return PlannedJob(
        command,
        gpu,
        machine,
        memory_model,
        runs,
        notes,
        first,
        batch,
        infers,
        noise_scale,
        step_pattern(recording_of(first), reserved_bytes=peak),
        varying_shapes(first),
        tuple(pairs),
        thorough,
    )
