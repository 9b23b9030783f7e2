"""Throughput over batch sizes, and the smallest of them that is nearly as fast as any.

The curve comes from scaling laws, or from batch sizes that were simulated one by one.
"""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from trainfit.hardware import GpuSpec
from trainfit.plan.sizing.costing import Pair, has_rates, samples_per_batch, speed_of, work_law
from trainfit.results.runs.recording import NotAffineError, Recording
from trainfit.results.speed import KNEE, StepSpeed
from trainfit.speed.step import HostedGpu, step_time
from trainfit.speed.work import Work, period_of

#: Batch sizes that are costed lie in steps of a quarter of the power of two below them.
_PARTS: Final = 4
_TILE: Final = 8


@dataclasses.dataclass(frozen=True)
class Grain:
    """The grain of the batch sizes that are chosen.

    Attributes:
        tile: samples that a process's batch is best a multiple of.
        unit: processes that divide a batch among them; a batch size is a multiple of it.
    """

    tile: int = _TILE
    unit: int = 1

    @staticmethod
    def of(gpu: GpuSpec, unit: int = 1) -> Grain:
        """Tensor cores work on tiles of 8; without them any number will do."""
        return Grain(_TILE if gpu.has_tensor_cores else 1, unit)

    @property
    def samples(self) -> int:
        """What a batch size is best a multiple of."""
        return self.tile * self.unit

    def rounded(self, batch: int) -> int:
        """Down to a multiple of :attr:`samples`, where one is left (a process's batch has at most 7
        samples less); else of the unit, 0 where none is left."""
        return batch - batch % (self.samples if batch > self.samples else self.unit)

    def allows(self, batch: int) -> bool:
        """May ``batch`` be chosen: a small one, or a multiple of :attr:`samples`?"""
        return not batch % (self.unit if batch <= self.samples // 2 else self.samples)


@dataclasses.dataclass(frozen=True)
class Curve:
    """Steps at other batch sizes, the smallest first, and what is to be said of them; one that
    ``grain`` allows is recommended."""

    steps: tuple[StepSpeed, ...] = ()
    notes: tuple[str, ...] = ()
    grain: Grain = Grain()


def with_step(curve: Curve, step: StepSpeed | None) -> Curve:
    """``curve`` with ``step`` in the place of that of its batch size."""
    if step is None:
        return curve
    others = [each for each in curve.steps if each.batch_size != step.batch_size]
    steps = sorted((*others, step), key=lambda each: each.batch_size or 0)
    return dataclasses.replace(curve, steps=tuple(steps))


def saturation_batch(curve: Curve, noise_scale: float | None = None) -> int | None:
    """The smallest batch size that is nearly as fast as any (:func:`knee`), as one that the
    curve's grain allows where one is left; ``None`` where that is not known.

    The multiple has to be nearly as fast itself: where a script takes a batch in parts of 3, that
    of 6 is, and that of 8 is not."""
    fast = [each.batch_size or 0 for each in _nearly_as_fast(curve.steps, noise_scale)]
    for size in fast:
        if curve.grain.allows(size):
            return size
    maximum, samples = curve.steps[-1].batch_size or 0 if fast else 0, curve.grain.samples
    return min(-(-fast[0] // samples) * samples, maximum) if fast else None


def curve_of(pair: Pair, machine: HostedGpu, largest: int, unit: int = 1) -> Curve:
    """Steps at multiples of ``unit`` up to ``largest``, from two recordings at different batch
    sizes."""
    largest -= largest % unit
    if not has_rates(machine.gpu) or len(pair) != 2 or not largest:
        return Curve()
    try:
        law = work_law(pair)
    except NotAffineError as error:
        return Curve((), (f"the step's time is not known at other batch sizes: {error}",))
    shares = {samples_per_batch(recording, batch) for batch, recording in pair}
    if len(shares) > 1:
        return Curve(
            (),
            (
                "the step's time is not known at other batch sizes: the samples of an optimizer "
                "step do not grow with the batch size",
            ),
        )
    per_batch = shares.pop()
    sizes = batch_sizes(largest, unit)
    return Curve(
        tuple(speed_of(step_time(law.at(size), machine), size, per_batch) for size in sizes),
        grain=Grain.of(machine.gpu, unit),
    )


def batch_sizes(largest: int, unit: int = 1) -> list[int]:
    """1, 2, 3, 4, 5, 6, 7, 8, 10, 12, … times ``unit``: four to each doubling, and the largest."""
    maximum = largest // unit
    sizes = {maximum}
    power = 1
    while power <= maximum:
        sizes |= {power + power * part // _PARTS for part in range(_PARTS)}
        power *= 2
    return sorted(unit * size for size in sizes if size <= maximum)


def knee(curve: Sequence[StepSpeed], noise_scale: float | None = None) -> int | None:
    """The smallest batch size that is nearly as fast as any, by samples a second.

    With the gradients' ``noise_scale`` B, in samples, by those that the same loss needs: with a
    batch size b as many as 1 + b / B times the least (McCandlish et al., "An Empirical Model of
    Large-Batch Training", 2018).
    """
    return next((each.batch_size for each in _nearly_as_fast(curve, noise_scale)), None)


def _nearly_as_fast(curve: Sequence[StepSpeed], noise_scale: float | None) -> list[StepSpeed]:
    """The steps that :func:`knee` chooses from, in the curve's order."""
    rates = [_rate(each) for each in curve]
    if noise_scale is not None:
        rates = [
            rate / (1 + rate * each.seconds / noise_scale)
            for each, rate in zip(curve, rates, strict=True)
        ]
    maximum = max(rates, default=0.0)
    timed = zip(curve, rates, strict=True)
    return [step for step, rate in timed if rate >= KNEE * maximum]


def rate_at(curve: Curve, batch: int) -> float | None:
    """Samples a second at a batch size, or what is in proportion to them; ``None`` outside the
    curve."""
    steps = {step.batch_size or 0: step for step in curve.steps}
    if not steps or not min(steps) <= batch <= max(steps):
        return None
    return _rate(steps[batch] if batch in steps else _between(steps, batch))


def with_sizes(curve: Curve, sizes: Iterable[int | None]) -> Curve:
    """``curve`` with steps at these batch sizes, too, where they lie between those it has."""
    steps = {step.batch_size or 0: step for step in curve.steps}
    inner = [size for size in sizes if size and steps and min(steps) < size < max(steps)]
    for size in inner:
        if size not in steps:
            curve = with_step(curve, _between(steps, size))
    return curve


def _rate(step: StepSpeed) -> float:
    """Samples a second, or what is in proportion to them at all batch sizes."""
    if step.samples_per_s is not None:
        return step.samples_per_s
    return (step.batch_size or 0) / step.seconds if step.seconds > 0 else 0.0


# ---
# Throughput curve from batch sizes that were simulated one by one.


#: Trials for the sake of throughput; each is a simulated run of seconds.
MOST_TRIALS: Final = 8
_GRID: Final = 8
#: Rates that differ by less than this share are one.
_ALIKE: Final = 0.005
#: Batch sizes that differ by a smaller share are next to one another: the curve may be wrong by as
#: much as a step changes between them.
_NEXT: Final = 1 / 8


def timed(
    recording: Recording, batch: int, machine: HostedGpu, full: int | None = None
) -> StepSpeed | None:
    """A step of a trial; ``None`` where nothing can be said.

    The median of its steps but the first, as shapes may differ from step to step (of an even
    number, the longer of the middle two); the mean of a period, where they repeat. After ``full``
    steps an epoch's last batch is short: what follows is not looked at (``None``: every step has
    full batches). Nothing is said where the first step alone is full: what a script does after a
    step counts to the next one.
    """
    if not has_rates(machine.gpu) or not recording.steps or full == 1:
        return None
    if full is not None:
        recording = recording.first_steps(min(full, recording.steps))
    works = [Work.of_step(recording, step) for step in range(1, recording.steps)]
    if not works or period_of(recording) > 1:
        works = [Work.of_steady_step(recording)]
    times = [step_time(work, machine) for work in works if len(work.table)]
    if not times:
        return None
    middle = statistics.median_high(each.seconds for each in times)
    time = next(each for each in times if each.seconds == middle)
    return speed_of(time, batch, samples_per_batch(recording, batch))


def curve_through(trials: Mapping[int, StepSpeed], most: int, unit: int = 1) -> Curve:
    """Steps up to ``most`` samples: as simulated, and in proportion between two that were.

    That is samples/s = B / (a + b B) from each trial to the next. Below the smallest trial the step
    time follows the line through the two smallest, and never less than half of it.
    """
    known = sorted(size for size in trials if size <= most)
    if not known:
        return Curve()
    sizes = sorted({*(size for size in batch_sizes(most, unit) if size <= known[-1]), *known})
    between = tuple(trials[size] if size in trials else _between(trials, size) for size in sizes)
    said = ", ".join(map(str, known))
    return Curve(between, (f"steps were simulated at batch sizes {said}; others lie between",))


def refine(
    trials: Mapping[int, StepSpeed],
    most: int,
    measure: Callable[[int], StepSpeed | None],
    noise_scale: float | None = None,
    most_timed: Callable[[], int | None] = lambda: None,
    trials_left: int = MOST_TRIALS,
    unit: int = 1,
    least: int = 0,
) -> dict[int, StepSpeed]:
    """More trials, until the recommended batch size no longer depends on which were made.

    ``measure`` simulates a batch size (``None``: it could not); ``most_timed`` says what it has
    learned of the largest that it can. First the fastest is sought, where
    it may still lie; then the smallest that is nearly as fast is bracketed between one that was
    simulated and falls short and one that was simulated and does not, neighbours but one on the
    grid of batch sizes. No more than ``trials_left`` are made. Of one that is no larger than
    ``least``, which is not the fastest, nothing more is asked: it would not be recommended.
    """
    known, failed = dict(trials), set[int]()
    grid = [size for size in batch_sizes(most, unit) if Grain(_GRID, unit).allows(size)]
    grid = sorted({*grid, most - most % unit})
    for _ in range(trials_left):
        if (bound := most_timed()) is not None and bound < grid[-1]:
            grid = sorted({*(size for size in grid if size < bound), bound})
        wanted = _next(known, grid, noise_scale, failed, least)
        if wanted is None:
            break
        step = measure(wanted)
        if step is None:
            failed.add(wanted)
        else:
            known[wanted] = step
    return known


def _next(
    known: Mapping[int, StepSpeed],
    grid: Sequence[int],
    noise_scale: float | None,
    failed: set[int],
    least: int,
) -> int | None:
    """The batch size to simulate next; ``None``: the bracket is sufficiently narrow."""
    most = grid[-1]
    tried = sorted(size for size in {*known, *failed} if size <= most)
    if len(tried) < 2:
        return most if most not in tried else _inside(0, most, grid)
    wanted = _promising(known, grid, noise_scale, tried)
    if wanted is not None:
        return wanted
    found = saturation_batch(curve_through(known, most), noise_scale)
    if found is None or found <= least:
        return None
    below = max((size for size in tried if size < found), default=0)
    inside = _inside(below, found, grid)
    return found if inside is None and found not in tried else inside


def _promising(
    known: Mapping[int, StepSpeed],
    grid: Sequence[int],
    noise_scale: float | None,
    tried: Sequence[int],
) -> int | None:
    """The batch size at which more samples a second than any that were seen may still be; ``None``:
    nowhere.

    A step's time is convex in the batch size (launches first, then work in proportion to it, or to
    its square): between two trials it is no less than the lines through two on either side say.
    """
    sizes = _apart(sorted(known), grid)

    def rate(size: int, seconds: float) -> float:
        """The rate of a micro-batch, of which a step may have several."""
        nearest = min(sizes, key=lambda each: abs(each - size))
        samples = size * parts_of(known[nearest])
        return size / seconds / (1 + samples / noise_scale if noise_scale else 1)

    def least(size: int) -> float:
        index = bisect.bisect_left(sizes, size)
        lines = [(index - 2, index - 1), (index, index + 1)]
        said = [
            _at_line(known, sizes[one], sizes[two], size)
            for one, two in lines
            if one >= 0 and two < len(sizes)
        ]
        return max([*said, 1e-9])

    values = (rate(size, _batch_s(known[size])) for size in known if size <= grid[-1])
    highest = max(values, default=0.0)
    best, best_rate = None, (1 + _ALIKE) * highest
    for low, high in zip([0, *tried], [*tried, grid[-1] + 1], strict=True):
        inner = grid[bisect.bisect_right(grid, low) : bisect.bisect_left(grid, high)]
        promised = max((rate(size, least(size)) for size in inner), default=0.0)
        if promised > best_rate:
            best, best_rate = inner, promised
    if best is None:
        return None
    return best[-1] if best[-1] == grid[-1] else best[len(best) // 2]


def _apart(sizes: Sequence[int], grid: Sequence[int]) -> list[int]:
    """``sizes``, of those next to one another one only, on the ``grid`` if it can: 33 samples run
    other kernels than 32, and a line through both says nothing of 16."""
    found: list[int] = []
    for size in sizes:
        if found and size - found[-1] < _NEXT * size:
            if found[-1] in grid or size not in grid:
                continue
            found.pop()
        found.append(size)
    return found


def _at_line(known: Mapping[int, StepSpeed], one: int, two: int, size: int) -> float:
    low, high = _batch_s(known[one]), _batch_s(known[two])
    return low + (high - low) * (size - one) / (two - one)


def _inside(low: int, high: int, grid: Sequence[int]) -> int | None:
    """The middle of the batch sizes between; ``None`` where there is one or none."""
    inner = grid[bisect.bisect_right(grid, low) : bisect.bisect_left(grid, high)]
    return inner[len(inner) // 2] if len(inner) > 1 else None


def _between(trials: Mapping[int, StepSpeed], size: int) -> StepSpeed:
    """The step on the line through the two neighbours that were simulated."""
    known = sorted(trials)
    if len(known) == 1:
        return _mixed(trials[known[0]], trials[known[0]], 0.0, size)
    index = min(max(bisect.bisect_left(known, size), 1), len(known) - 1)
    low, high = known[index - 1], known[index]
    return _mixed(trials[low], trials[high], (size - low) / (high - low), size)


def _mixed(low: StepSpeed, high: StepSpeed, share: float, size: int) -> StepSpeed:
    """A step between two, micro-batch by micro-batch: a script may have fewer of the larger."""
    near = low if share < 0.5 else high
    parts, of_low, of_high = map(parts_of, (near, low, high))

    def mix(one: float, two: float) -> float:
        first, second = one / of_low, two / of_high
        return parts * max(first + share * (second - first), first / 2)

    seconds = mix(low.seconds, high.seconds)
    core = None
    if low.core_s is not None and high.core_s is not None:
        core = mix(low.core_s, high.core_s)
    known = near.samples_per_s is not None and seconds > 0
    return dataclasses.replace(
        near,
        batch_size=size,
        seconds=seconds,
        range_s=(mix(low.range_s[0], high.range_s[0]), mix(low.range_s[1], high.range_s[1])),
        gpu_s=mix(low.gpu_s, high.gpu_s),
        host_s=mix(low.host_s, high.host_s),
        copies_s=mix(low.copies_s, high.copies_s),
        samples_per_s=size * parts / seconds if known else None,
        core_s=core,
    )


def parts_of(step: StepSpeed) -> float:
    """Samples of a step for each of its batch size; 1 where they are not known."""
    if step.samples_per_s is None or not step.batch_size:
        return 1.0
    return step.samples_per_s * step.seconds / step.batch_size or 1.0


def _batch_s(step: StepSpeed) -> float:
    """A step's time for one micro-batch."""
    return step.seconds / parts_of(step)
