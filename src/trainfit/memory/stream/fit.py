"""The largest batch that fits a capacity, found on the replayed allocator alone."""

from __future__ import annotations

from collections.abc import Callable

from trainfit.memory.stream.affine import AffineStream
from trainfit.memory.stream.replay import UNLIMITED, replay
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
