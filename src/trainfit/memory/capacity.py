"""What fits a capacity: the largest batch, the device's memory, the prediction interval."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from trainfit.memory.affine import AffineStream
from trainfit.memory.peak import moment
from trainfit.memory.replay import UNLIMITED, Replay, Stream, live_at, replay
from trainfit.results.gpus import CONTEXT, Constant, total
from trainfit.results.memory import BatchLaw, BatchPoint, MemoryFigures, Moment, PeakMove
from trainfit.results.runs.recording import (
    KINDS,
    IntArray,
    NotAffineError,
    Recording,
    decode_context_parts,
)
from trainfit.simgpu.allocator.settings import AllocatorSettings
from trainfit.simgpu.device.settling import in_use

#: No search goes further: a batch this large is bounded by something other than memory.
LARGEST = 1 << 20
#: From ``_COARSE`` samples on, the search goes by so many at a time. Memory need not rise with each
#: sample: at odd batch sizes blocks can be of sizes that are not used again.
_STEP, _COARSE = 8, 64


def fits(
    stream: AffineStream,
    batch: int,
    capacity_bytes: int,
    context_bytes: int,
    settings: AllocatorSettings | None = None,
    *,
    within_bytes: int | None = None,
) -> bool:
    """Does ``batch`` run on a device of this capacity (releasing caches where needed)?

    With ``within_bytes``: and would it on one of no more than that, as
    :meth:`DeviceCapacity.has_room` has it?
    """
    device = DeviceCapacity(capacity_bytes, context_bytes, settings or AllocatorSettings())
    if within_bytes is None:
        return device.replay(stream.at(batch)).fits
    return device.within(within_bytes).has_room(stream.at(batch))


def largest_batch(
    stream: AffineStream,
    capacity_bytes: int,
    context_bytes: int,
    settings: AllocatorSettings | None = None,
    *,
    within_bytes: int | None = None,
) -> int:
    """The largest batch that fits, 0 if not even one sample does.

    Guesses by the secant of reserved memory and closes in by bisection: the allocator's
    rounding makes memory a staircase, so only a replay decides. Of large batches, the largest
    multiple of 8 that fits, or one of the seven above it.
    """

    def good(batch: int) -> bool:
        return fits(
            stream, batch, capacity_bytes, context_bytes, settings, within_bytes=within_bytes
        )

    if not good(1):
        return 0
    guess = _guess(stream, (within_bytes or capacity_bytes) - context_bytes)
    step = _STEP if guess >= _COARSE else 1
    low = step * _last_good(lambda steps: good(steps * step), guess // step, LARGEST // step)
    above = range(low + step - 1, low, -1) if low < LARGEST else ()
    return next((batch for batch in above if good(batch)), max(low, 1))


def _last_good(good: Callable[[int], bool], guess: int, limit: int) -> int:
    """The last number up to ``most`` that is good, 0 where 1 is not: looked for near ``guess``."""
    low, high = 0, min(max(guess, 1), limit)
    while good(high):
        if high == limit:
            return limit
        low, high = high, min(max(high + 1, high + high // 16), limit)
    # Usually the guess is close: first look just below it, then bisect.
    near = high - max(1, high // 16)
    if near > low:
        low, high = (near, high) if good(near) else (low, near)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def _guess(stream: AffineStream, free_bytes: int) -> int:
    """The batch size at which the line through two peaks of reserved memory meets free memory."""
    one, two = sorted(stream.batches)
    peaks = [replay(stream.at(b), capacity_bytes=UNLIMITED).peak_reserved for b in (one, two)]
    slope = max((peaks[1] - peaks[0]) / (two - one), 1.0)
    return int(min(max(one + (free_bytes - peaks[0]) / slope, 2), LARGEST))


# ---
# Prediction interval of a memory figure.
#
# What PyTorch's own code decides is exact. Three things are not: the workspaces that cuDNN takes
# (modelled, and its choice among algorithms changes with version and GPU), the fragmentation of
# the reserved memory (the real order of frees differs in details), and the CUDA context (given as
# a range with the GPU). How often the bounds hold is in :mod:`trainfit.results.plan`.


#: Margins as shares: of the reserved memory (fragmentation), and of what the estimated
#: workspaces add to it. Quantiles of the errors of every second model of that table.
LOW_OF_RESERVED: Final = 0.07
HIGH_OF_RESERVED: Final = 0.10
OF_WORKSPACES: Final = 0.3
#: Of the allocated memory: up to 1 MiB of a block is left over where blocks are not split, which
#: depends on addresses; and what estimated workspaces shift where they are not at the peak
#: themselves. On the 91 jobs of bench/gpu/truth that were looked at the first alone held the
#: truth wherever nothing was estimated, both together for 86.
OF_ALLOCATED: Final = 0.0025
OF_ESTIMATING: Final = 0.01


@dataclasses.dataclass(frozen=True)
class PredictionInterval:
    """Bytes of a figure's 90% prediction interval."""

    low: int
    high: int


def reserved_bounds(peak_reserved: int, without_workspaces: int) -> PredictionInterval:
    """Bounds of reserved memory, from the peaks with and without estimated workspaces."""
    added = max(peak_reserved - without_workspaces, 0)
    low = peak_reserved * (1 - LOW_OF_RESERVED) - added * OF_WORKSPACES
    high = peak_reserved * (1 + HIGH_OF_RESERVED) + added * OF_WORKSPACES
    return PredictionInterval(int(low), int(high))


def largest_by_line(
    points: tuple[tuple[int, int], tuple[int, int]], within_bytes: int
) -> int | None:
    """The largest batch size that needs no more than ``within_bytes``, by a line through two batch
    sizes with their bytes; 0: none. ``None``: any."""
    (few, low), (many, high) = sorted(points)
    slope = (high - low) / (many - few)
    if slope <= 0:
        return None if max(low, high) <= within_bytes else 0
    return max(0, int(few + (within_bytes - low) / slope))


def bounds_of(outcome: Replay) -> tuple[PredictionInterval, PredictionInterval]:
    """Bounds of allocated and of reserved memory of a replay.

    Requests are exact but for the workspaces. Allocated memory is within a share of what those
    add at the peak (all of it, where nobody measured that GPU's), and of the whole: a quarter of a
    percent, and one percent more where any workspace is estimated.
    """
    stream = outcome.stream
    allocated, reserved = outcome.peak_allocated, outcome.peak_reserved
    if stream.estimated.any():
        bare = replay(stream.without(stream.estimated), settings=outcome.settings)
        allocated, reserved = bare.peak_allocated, bare.peak_reserved
    within = reserved_bounds(outcome.peak_reserved, reserved)
    if outcome.retries:  # what does not fit is returned
        maximum = max(outcome.peak_reserved, min(within.high, outcome.free_bytes))
        within = dataclasses.replace(within, high=maximum)
    added = max(outcome.peak_allocated - allocated, 0)
    share = OF_ALLOCATED + (OF_ESTIMATING if stream.estimated.any() else 0)
    margin = int(added * stream.uncertain + outcome.peak_allocated * share)
    return (
        PredictionInterval(outcome.peak_allocated - margin, outcome.peak_allocated + margin),
        within,
    )


# ---
# Device memory: what the allocator reserved, and what the process uses in addition.


def context_parts(recording: Recording) -> tuple[Constant, ...]:
    """Memory outside the allocator: the context, and the libraries that the process used.

    Recordings of the first version know nothing but the sum.
    """
    parts = decode_context_parts(recording.header)
    if parts:
        return parts
    low, high = recording.header["context_range_bytes"]
    value = recording.header["context_bytes"]
    return (Constant(CONTEXT, value, min(low, value), max(high, value), "assumed", "assumed"),)


def figures(outcome: Replay, parts: Iterable[Constant]) -> MemoryFigures:
    """The three quantities of a replay, with the process's other memory."""
    listed = tuple(parts)
    context, low, high = total(listed)
    allocated, reserved = bounds_of(outcome)
    return MemoryFigures(
        allocated_bytes=outcome.peak_allocated,
        reserved_bytes=outcome.peak_reserved,
        device_bytes=outcome.peak_reserved + context,
        context_bytes=context,
        context_range_bytes=(low, high),
        context_parts=listed,
        allocated_range_bytes=(allocated.low, allocated.high),
        reserved_range_bytes=(reserved.low, reserved.high),
        device_range_bytes=(reserved.low + low, reserved.high + high),
        retries=outcome.retries,
    )


# ---
# How memory grows with the batch size, and where the straight line ends.


_Slopes = npt.NDArray[np.float64]

#: Batch sizes around the larger recorded one whose neighbours are compared.
_AROUND = 8
#: Components of a module's path that say where a peak is.
_DEPTH = 2


@dataclasses.dataclass(frozen=True)
class DeviceCapacity:
    """The GPU's memory and the context's share of it, in bytes, and the allocator's settings."""

    capacity_bytes: int
    context_bytes: int
    settings: AllocatorSettings

    def within(self, nbytes: int) -> DeviceCapacity:
        """The same GPU, of whose memory no more than ``nbytes`` are to be used. What a memory
        fraction allows stays a share of the whole (setMemoryFraction in CUDACachingAllocator.cpp).
        """
        fraction = self.settings.per_process_memory_fraction
        if fraction < 1:
            fraction = min(fraction * self.capacity_bytes / max(nbytes, 1), 1.0)
        settings = dataclasses.replace(self.settings, per_process_memory_fraction=fraction)
        return DeviceCapacity(nbytes, self.context_bytes, settings)

    def replay(self, stream: Stream) -> Replay:
        """The stream replayed at the GPU's capacity."""
        return replay(
            stream,
            capacity_bytes=self.capacity_bytes,
            context_bytes=self.context_bytes,
            settings=self.settings,
        )

    def has_room(self, stream: Stream) -> bool:
        """Does it run here, without asking the device in each step (of a text: call) for what
        PyTorch has returned to it? Blocks that nothing will use (a KV cache of a new size for each
        token leaves them) are returned when memory is full, and none the slower."""
        limited = self.replay(stream)
        if not limited.fits or not limited.retries:
            return limited.fits
        asked, free = limited.step_device_allocations, self.unlimited(stream)
        twice = _after_first(asked) - _after_first(free.step_device_allocations)
        return twice * _SELDOM < max(1, (stream.calls or len(asked)) - 1)

    def unlimited(self, stream: Stream) -> Replay:
        """The stream replayed as if the GPU had memory without end."""
        return replay(stream, settings=self.settings)

    def shown(self, stream: Stream) -> tuple[Replay, bool]:
        """A replay at the GPU's capacity, or what does not fit as :meth:`needed` has it; does it
        fit?"""
        limited = self.replay(stream)
        return (limited if limited.fits else self.needed(stream)), limited.fits

    def needed(self, stream: Stream) -> Replay:
        """A replay on a larger GPU, for what does not fit this one: without end, or where most of
        that would be blocks that PyTorch keeps and does not use (a KV cache of a new size for each
        token), on the smallest that it fits."""
        free = self.unlimited(stream)
        if free.peak_reserved <= _CACHED * free.peak_allocated:
            return free
        least = least_capacity(stream, self)
        return dataclasses.replace(self, capacity_bytes=least).replay(stream)


#: One block in so many steps that is asked for twice costs next to nothing.
_SELDOM: Final = 8


def _after_first(counts: tuple[int, ...]) -> int:
    """The change of a count at the ends of steps: since the first, where there are others."""
    return counts[-1] - counts[0] if len(counts) > 1 else sum(counts)


#: Reserved memory for allocated, beyond which it is not what a job needs.
_CACHED: Final = 2.0

#: Which share of itself the least memory is told to.
_TO: Final = 1 / 512


def least_capacity(stream: Stream, device: DeviceCapacity) -> int:
    """Bytes of the smallest GPU that ``stream`` fits, otherwise like ``device``: what it allocates
    is not sufficient, and what it reserves not needed, as PyTorch returns blocks when memory is
    full."""
    free = device.unlimited(stream)
    low, high = (device.context_bytes + n for n in (free.peak_allocated, free.peak_reserved))
    while high - low > high * _TO:
        middle = (low + high) // 2
        tried = dataclasses.replace(device, capacity_bytes=middle).replay(stream)
        low, high = (low, middle) if tried.fits else (middle, high)
    return high


def batch_law(
    first: Recording, batch: int, second: Recording, other: int, device: DeviceCapacity
) -> BatchLaw:
    """The law of two recordings of one script at two batch sizes, and its limits.

    Raises ``NotAffineError`` where the two do not follow one.
    """
    steps = min(first.steps, second.steps)
    law = AffineStream.between(first.first_steps(steps), batch, second.first_steps(steps), other)
    _require_growth(law)
    return _Explained(law, device).law()


class _Explained:
    def __init__(self, law: AffineStream, device: DeviceCapacity) -> None:
        self._law = law
        self._device = device
        self._low, self._high = sorted(law.batches)
        self._where: dict[int, str] = {}

    def law(self) -> BatchLaw:
        largest = largest_batch(
            self._law,
            self._device.capacity_bytes,
            self._device.context_bytes,
            self._device.settings,
        )
        points = self._points(largest)
        base, slope = _line(points)
        jump, jump_at = self._largest_jump()
        live, slopes = self._at_peak()
        at_high = float(self._law.at(self._high).alloc_bytes[live].sum())
        return BatchLaw(
            law="proportional",
            batches=(self._low, self._high),
            allocated_base_bytes=round(at_high - float(slopes.sum()) * self._high),
            allocated_per_sample_bytes=float(slopes.sum()),
            per_sample_by_kind_bytes=_by_kind(self._law.template, live, slopes),
            per_sample_by_module_bytes=_by_module(self._law.template, live, slopes),
            device_base_bytes=round(base),
            device_per_sample_bytes=slope,
            points=tuple(
                dataclasses.replace(point, line_bytes=round(base + slope * point.batch_size))
                for point in points
            ),
            moves=self._moves([point.batch_size for point in points]),
            largest_batch=largest,
            largest_jump_bytes=jump,
            largest_jump_at=jump_at,
        )

    def _points(self, largest: int) -> list[BatchPoint]:
        """Powers of two up to what fits, the recorded batch sizes, the first that fails."""
        top = max(largest, self._high)
        powers = [1 << i for i in range(top.bit_length())]
        edge = [largest, largest + 1] if 0 < largest < LARGEST else [max(largest, 1)]
        return [self._point(batch) for batch in sorted({*powers, self._low, self._high, *edge})]

    def _point(self, batch: int) -> BatchPoint:
        stream = self._law.at(batch)
        shown, fits = self._device.shown(stream)
        return BatchPoint(
            batch_size=batch,
            allocated_bytes=shown.peak_allocated,
            reserved_bytes=shown.peak_reserved,
            device_bytes=shown.peak_reserved + self._device.context_bytes,
            line_bytes=0,
            fits=fits,
            where=self._place(batch),
        )

    def _at_peak(self) -> tuple[IntArray, _Slopes]:
        """What is alive at the peak of the larger recorded batch size, and how each of it
        grows, in bytes a sample."""
        low, high = (self._law.at(batch) for batch in (self._low, self._high))
        live = live_at(high, _peak_event(high))
        grown = high.alloc_bytes[live] - low.alloc_bytes[live]
        return live, grown / (self._high - self._low)

    def _moves(self, sizes: list[int]) -> tuple[PeakMove, ...]:
        """Places at which the peak moves between neighbours of ``sizes``, found by bisection."""
        moves = []
        for low, high in itertools.pairwise(sizes):
            while self._place(low) != self._place(high):
                start, left, right = self._place(low), low, high
                while right - left > 1:
                    middle = (left + right) // 2
                    left, right = (
                        (middle, right) if self._place(middle) == start else (left, middle)
                    )
                moves.append(PeakMove(right, start, self._place(right)))
                low = right
        return tuple(moves)

    def _largest_jump(self) -> tuple[int, int | None]:
        """The largest step of reserved memory between neighbouring batch sizes."""
        start = max(self._high - _AROUND, 1)
        sizes = range(start, self._high + _AROUND + 1)
        reserved = [self._device.unlimited(self._law.at(batch)).peak_reserved for batch in sizes]
        jumps = np.diff(reserved)
        index = int(np.argmax(jumps))
        return int(jumps[index]), sizes[index + 1] if jumps[index] > 0 else None

    def _place(self, batch: int) -> str:
        if batch not in self._where:
            event = _peak_event(self._law.at(batch))
            self._where[batch] = place(moment(self._law.template, event), _DEPTH)
        return self._where[batch]


def _line(points: list[BatchPoint]) -> tuple[float, float]:
    """Base and slope of device memory: least squares over all points (two at least)."""
    slope, base = np.polyfit(
        [point.batch_size for point in points], [point.device_bytes for point in points], 1
    )
    return float(base), float(slope)


def place(where: Moment, depth: int | None = None) -> str:
    """In words, where a peak is: "backward of ACTPolicy.encoder", "optimizer step"."""
    if where.phase == "optimizer":
        return "optimizer step"
    path = ".".join(where.module.split(".")[:depth])
    if where.phase in ("setup", "input") or not path:
        return f"{where.phase} outside of modules" if where.phase != "setup" else "setup"
    return f"{where.phase} of {path}"


def _require_growth(law: AffineStream) -> None:
    if not law.depends_on_batch:
        raise NotAffineError("nothing depends on the batch size")
    below = law.base < 0 if law.batches[0] < law.batches[1] else law.base > 0
    below[law.recorded.workspace_alloc] = False  # they have models of their own
    if below.any():
        module = int(law.recorded.alloc_module[int(below.argmax())])
        name = law.recorded.strings[module] if module >= 0 else ""
        where = f" in {name}" if name else ""
        raise NotAffineError(
            f"a tensor{where} would have a negative size at batch size 0: it does "
            "not grow linearly with the batch size"
        )


def _peak_event(stream: Stream) -> int:
    """The event at which the sum of all allocations is largest."""
    return int(np.argmax(in_use(stream.events, stream.alloc_bytes)))


def _by_kind(recording: Recording, live: IntArray, slopes: _Slopes) -> Mapping[str, float]:
    totals = np.bincount(recording.alloc_kind[live], slopes, minlength=len(KINDS))
    return {kind: float(totals[code]) for code, kind in enumerate(KINDS) if totals[code]}


def _by_module(recording: Recording, live: IntArray, slopes: _Slopes) -> Mapping[str, float]:
    totals: dict[str, float] = {}
    for module, slope in zip(recording.alloc_module[live].tolist(), slopes.tolist(), strict=True):
        path = recording.strings[module] if module >= 0 else ""
        path = ".".join(path.split(".")[:_DEPTH])
        totals[path] = totals.get(path, 0.0) + slope
    found = {path: total for path, total in totals.items() if total}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
