"""Memory model: recorded allocations on the GPU of a plan.

Where memory grows from step to step, it says when that is too much for a recommended batch size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from trainfit.hardware import GpuSpec
from trainfit.memory import capacity
from trainfit.memory.affine import AffineStream
from trainfit.memory.capacity import DeviceCapacity, bounds_of, largest_batch
from trainfit.memory.replay import Replay, Stream
from trainfit.plan.runs.batches import most_full
from trainfit.plan.runs.failures import ScriptError
from trainfit.plan.runs.runs import Runs
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.plan.sizing.costing import memory_law
from trainfit.plan.sizing.curve import Curve
from trainfit.results.configuration import BatchCheck, BatchLimits
from trainfit.results.gpus import Constant, total
from trainfit.results.memory import MemoryFigures
from trainfit.results.plan import Basis
from trainfit.results.runs.recording import NotAffineError, Recording
from trainfit.results.runs.spec import RunSpec
from trainfit.results.runs.steps import LONG_TRAINING, StepPattern
from trainfit.results.text import size
from trainfit.simgpu.allocator.settings import AllocatorSettings


@dataclasses.dataclass(frozen=True)
class MemoryModel:
    """A GPU, the allocator's settings, and the share of memory to leave free.

    ``context`` are the parts of its memory outside the allocator, by library;
    ``other_processes_bytes`` of the GPU are held by others.
    """

    gpu: GpuSpec
    settings: AllocatorSettings
    headroom: float
    context: tuple[Constant, ...]
    other_processes_bytes: int = 0

    @property
    def capacity_bytes(self) -> int:
        """What the GPU has for this process."""
        return self.gpu.memory_bytes - self.other_processes_bytes

    @property
    def context_bytes(self) -> int:
        """Memory of the process outside PyTorch's allocator, in bytes."""
        return total(self.context)[0]

    @property
    def usable_bytes(self) -> int:
        """Memory that the job may use, without the headroom, in bytes."""
        return int(self.gpu.memory_bytes * (1 - self.headroom)) - self.other_processes_bytes

    def margin(self, recording: Recording) -> float:
        """The share of the GPU to leave free so that the upper bound still fits a full one.

        The excess of reserved memory over its figure is scaled from the recorded job; the context
        is not scaled.
        """
        outcome = self.unlimited(Stream.of(recording))
        _, reserved = bounds_of(outcome)
        context, _, most = total(self.context)
        room = self.capacity_bytes - most
        if room <= 0 or not outcome.peak_reserved:
            return 0.0
        usable = room * outcome.peak_reserved / reserved.high + context
        return 1 - min(usable / self.capacity_bytes, 1.0)

    @property
    def device(self) -> DeviceCapacity:
        """The GPU as far as a replay asks for it."""
        return DeviceCapacity(self.capacity_bytes, self.context_bytes, self.settings)

    def limited(self, stream: Stream) -> Replay:
        """A replay at the GPU's capacity."""
        return self.device.replay(stream)

    def leaves_margin(self, stream: Stream) -> bool:
        """Does it leave the headroom free, but for blocks that nothing uses?"""
        return self.device.within(self.usable_bytes).has_room(stream)

    def unlimited(self, stream: Stream) -> Replay:
        """A replay as if memory had no end."""
        return self.device.unlimited(stream)

    def shown(self, stream: Stream) -> tuple[Replay, bool]:
        """A replay at the capacity, or as a larger GPU would have it where that is too small;
        does it fit?"""
        return self.device.shown(stream)

    def figures(
        self, outcome: Replay, context: tuple[Constant, ...] | None = None
    ) -> MemoryFigures:
        """The three quantities; ``context`` is that of another run than the job's own."""
        return capacity.figures(outcome, self.context if context is None else context)

    def largest(self, law: AffineStream, within_bytes: int | None = None) -> int:
        """The largest batch that fits within ``within_bytes``."""
        return largest_batch(
            law,
            self.capacity_bytes,
            self.context_bytes,
            self.settings,
            within_bytes=within_bytes,
        )

    def with_settings(self, settings: AllocatorSettings) -> MemoryModel:
        """The same model with another allocator."""
        return dataclasses.replace(self, settings=settings)


# ---
# Memory that grows from step to step: when it is too much for a batch size to be recommended.


@dataclasses.dataclass(frozen=True)
class Growth:
    """``bytes_per_step`` that stay behind with each optimizer step at the current batch size (0:
    memory does not grow), ``spare_bytes``, what a recommendation leaves free of the GPU, and
    ``in_all_bytes``, by which memory grows there until what keeps it is full (``None``: it has no
    end)."""

    bytes_per_step: int = 0
    spare_bytes: int = 0
    in_all_bytes: int | None = None

    @classmethod
    def of(cls, pattern: StepPattern, memory_model: MemoryModel) -> Growth:
        """What a run's steps showed. That of a model's calls (a KV cache) ends with the text, one
        that each epoch's end lets go with the epoch."""
        if pattern.course != "growing" or pattern.unit == "model call" or pattern.freed_every:
            return cls()
        return cls(
            pattern.growth_bytes_per_step or 0,
            memory_model.capacity_bytes - memory_model.usable_bytes,
            pattern.grows_by_bytes,
        )

    @classmethod
    def on(cls, pattern: StepPattern, free_bytes: int) -> Growth:
        """The growth on another GPU, of which the job as it was simulated leaves ``free_bytes``."""
        if pattern.course != "growing" or pattern.unit == "model call" or pattern.freed_every:
            return cls()
        return cls(pattern.growth_bytes_per_step or 0, max(free_bytes, 0), pattern.grows_by_bytes)

    @property
    def is_large(self) -> bool:
        """Would it be too much for a long training, if it had no end?"""
        return self.bytes_per_step * LONG_TRAINING > self.spare_bytes

    @property
    def unfit(self) -> str:
        """Why no batch size at all is to be recommended; empty where one may be."""
        return self._reason(self.bytes_per_step)

    def unfit_at(self, replay: Replay) -> str:
        """Why a batch size is not to be recommended, from its ``replay``: what stays behind may be
        larger."""
        if not self.bytes_per_step:
            return ""
        peaks = [allocated for allocated, _ in replay.step_peaks[-2:]]
        return self._reason(max(self.bytes_per_step, peaks[-1] - peaks[0] if peaks else 0))

    def _reason(self, bytes_per_step: int) -> str:
        in_all = float(bytes_per_step * LONG_TRAINING)
        if self.in_all_bytes is not None and self.bytes_per_step:
            in_all = min(in_all, self.in_all_bytes * bytes_per_step / self.bytes_per_step)
        if in_all <= self.spare_bytes:
            return ""
        growth = size(bytes_per_step)
        return f"no batch size is recommended while memory grows ({growth} with each step)"


# ---
# What is known of other batch sizes of a job: laws of memory from two runs, if they hold.


# ---
# What is known of other batch sizes of a job.


#: A recording at each of two batch sizes.
RecordedPair = tuple[tuple[int, Recording], ...]


@dataclasses.dataclass(frozen=True)
class Batches:
    """Results for other batch sizes; ``recommended_peak`` is the peak at the recommended one.

    ``recommended`` and ``limits``: see :mod:`trainfit.plan.sizing.recommendation`.
    ``basis_detail`` says why, where ``basis`` is not "two traces"; ``law`` is there where it is,
    ``pair`` the recordings that it is from, and ``curve`` the steps at other batch sizes.
    ``check`` says whether the recommended one was simulated.
    """

    basis: Basis
    basis_detail: str = ""
    largest: int | None = None
    recommended: int | None = None
    recommended_peak: Replay | None = None
    law: AffineStream | None = None
    pair: RecordedPair = ()
    limits: BatchLimits | None = None
    curve: Curve = dataclasses.field(default_factory=Curve)
    check: BatchCheck | None = None

    @property
    def by_noise(self) -> int | None:
        """The batch size of :attr:`BatchLimits.by_noise`; ``None`` without limits."""
        return self.limits.by_noise if self.limits is not None else None

    @property
    def furthest(self) -> int | None:
        """The batch size that anything is said of: the option's, where there is one."""
        option = self.limits.option if self.limits is not None else None
        return option.batch_size if option is not None else self.recommended


def law_of(
    runs: Runs, traces: Mapping[int, Trace], spec: RunSpec
) -> tuple[RecordedPair, AffineStream]:
    """What two runs say of other batch sizes; raises ``NotAffineError``."""
    pair = tuple((size, recording_of(trace)) for size, trace in traces.items())
    law = memory_law(pair)
    _check_law(runs, law, spec)
    return pair, law


def law_above(
    runs: Runs, known: dict[int, Trace], batch: int, size: int, spec: RunSpec
) -> tuple[RecordedPair, AffineStream] | None:
    """A rule from ``size`` and twice that, where libraries do something else only below;
    ``None`` if there is none. ``known`` gets the run."""
    most = most_full(known[batch], batch)
    if most is not None and 2 * size > most:
        return None
    try:
        known[2 * size] = runs.trace(2 * size, spec)
        return law_of(runs, {at: known[at] for at in (size, 2 * size)}, spec)
    except (ScriptError, NotAffineError):
        return None  # they are simulated one by one


def _check_law(runs: Runs, law: AffineStream, spec: RunSpec) -> None:
    """Compare a law that looks odd with a third batch size; raises ``NotAffineError``.

    What grows with the square of the batch size (a contrastive loss) gives a line too,
    but one that is below zero at batch size 0.
    """
    one, two = sorted(law.batches)
    below_zero = law.base < 0 if law.batches == (one, two) else law.base > 0
    below_zero[law.recorded.workspace_alloc] = False  # they have models of their own
    if not below_zero.any():
        return
    third = (one + two) // 2 if two - one > 1 else one - 1
    if third < 2:
        third = two + 1
    try:
        recording = recording_of(runs.trace(third, spec))
        alloc_bytes = (recording.simulated or recording).alloc_bytes
    except ScriptError as error:
        raise NotAffineError(f"a third could not be simulated ({error.in_note})") from None
    expected, _ = law.sizes(third)
    differs = alloc_bytes[: len(expected)] != expected[: len(alloc_bytes)]
    if not differs.any():
        return
    name = law.recorded.strings[int(law.recorded.alloc_module[int(differs.argmax())])]
    where = f", first in {name}" if name else ""
    raise NotAffineError(f"sizes do not grow in proportion to the batch size{where}")
