"""What fits a capacity: the largest batch, the device's memory, the prediction interval."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Final

from trainfit.memory.affine import AffineStream
from trainfit.memory.replay import UNLIMITED, Replay, replay
from trainfit.results.gpus import CONTEXT, Constant, total
from trainfit.results.memory import MemoryFigures
from trainfit.results.runs.recording import Recording, decode_context_parts
from trainfit.simgpu.allocator.settings import AllocatorSettings

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

    With ``within_bytes``: and does the process, context included, never take more than that?
    """
    outcome = replay(
        stream.at(batch),
        capacity_bytes=capacity_bytes,
        context_bytes=context_bytes,
        settings=settings,
    )
    taken = outcome.peak_reserved + context_bytes
    return outcome.fits and (within_bytes is None or taken <= within_bytes)


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


def _last_good(good: Callable[[int], bool], guess: int, most: int) -> int:
    """The last number up to ``most`` that is good, 0 where 1 is not: looked for near ``guess``."""
    low, high = 0, min(max(guess, 1), most)
    while good(high):
        if high == most:
            return most
        low, high = high, min(max(high + 1, high + high // 16), most)
    # Usually the guess is close: first look just below it, then bisect.
    near = high - max(1, high // 16)
    if near > low:
        low, high = (near, high) if good(near) else (low, near)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def _guess(stream: AffineStream, free_bytes: int) -> int:
    """Where the line through two peaks of reserved memory meets the free memory."""
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
    added = max(outcome.peak_allocated - allocated, 0)
    share = OF_ALLOCATED + (OF_ESTIMATING if stream.estimated.any() else 0)
    margin = int(added * stream.uncertain + outcome.peak_allocated * share)
    return (
        PredictionInterval(outcome.peak_allocated - margin, outcome.peak_allocated + margin),
        reserved_bounds(outcome.peak_reserved, reserved),
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
    )
