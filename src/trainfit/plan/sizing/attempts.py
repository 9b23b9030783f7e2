"""Attempts at batch sizes: their runs, whether they fit, and whether they take another path.

Jobs whose memory follows no law of the batch size are searched for the largest one that fits.

Where a search for the largest value that fits looks next, by what the values so far need.

A parabola through the nearest of them says where (what is materialised for each pair of positions
grows with the square); whether a value fits is known of those alone that were simulated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from trainfit.memory.replay import Replay, Stream
from trainfit.plan.runs.batches import full_part, full_steps, is_full, most_timed
from trainfit.plan.runs.failures import NotSimulated, ScriptError
from trainfit.plan.runs.progress import CHANGES, Notes
from trainfit.plan.runs.runs import Runs
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.plan.sizing.curve import Curve, curve_through, refine, timed
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.results.files.contents import Severity
from trainfit.results.runs.recording import PHASES, Recording
from trainfit.results.runs.spec import RunSpec
from trainfit.results.speed import StepSpeed
from trainfit.speed.step import HostedGpu
from trainfit.speed.work import steady

# ---
# Do runs at other batch sizes take the same path through the script?


#: Share of a batch's operators that a larger batch may have less: other kernels' choices, a last
#: piece that is cut up otherwise. More are no sign: many scripts loop over a batch's samples.
_LESS: Final = 0.2
_OPTIMIZER: Final = PHASES.index("optimizer")


def takes_other_path(batch: int, present: Recording, size: int, run: Recording) -> bool:
    """Are a step's operators at ``size`` far fewer than at ``batch``, the current batch size (or,
    where ``size`` is the smaller, the other way round)?"""
    return _is_other(batch, _operators(present), size, _operators(run))


def other_path(batch: int, runs: Mapping[int, Recording]) -> str:
    """A sentence on batch sizes whose batches run far fewer operators than those of smaller ones;
    empty where there are none. ``batch`` is the current batch size.

    What a script does can depend on data, which a simulation knows of small tensors alone.
    """
    present = _operators(runs[batch])
    found = {size: _operators(each) for size, each in sorted(runs.items())}
    others = {size: n for size, n in found.items() if _is_other(batch, present, size, n)}
    if not others:
        return ""
    said = ", ".join(f"{n} at batch size {size}" for size, n in others.items())
    return (
        f"steps run different code at other batch sizes (operators per batch: {present} at "
        f"{batch}, "
        f"{said}): the script depends on values that a simulation does not have; try "
        "other batch sizes on the GPU"
    )


def _is_other(batch: int, present: int, size: int, operators: int) -> bool:
    small, large = (present, operators) if size > batch else (operators, present)
    return large < (1 - _LESS) * small


def _operators(recording: Recording) -> int:
    """The number of operators of each micro-batch of the typical step, without the optimizer's.

    A script that keeps its effective batch size accumulates over more of the smaller batches.
    """
    typical, makeup = steady(recording), recording.makeup
    mine = (recording.op_step == typical) & (recording.op_phase != _OPTIMIZER)
    mine &= ~recording.in_evaluation()
    per_step = makeup.per_step if makeup is not None else ()
    parts = per_step[typical] if typical < len(per_step) else 1
    return int(np.count_nonzero(mine)) // max(parts, 1)


# ---
# The largest batch size by trial, for jobs whose memory follows no law of the batch size.


#: Trials in all; each is a simulated run of seconds.
MOST_TRIALS = 8
#: No trial goes further beyond the others than by this factor: the line through two small
#: batch sizes says little of large ones.
_FURTHEST = 8
#: A bracket no wider than this share of its batch size is sufficiently narrow.
_NARROW = 1 / 16


@dataclasses.dataclass(frozen=True)
class SimulatedBatch:
    """One batch size: its peak of reserved memory, unlimited, and where it runs.

    ``fits`` is at the GPU's capacity, ``fits_with_headroom`` with the headroom left free.
    """

    batch: int
    reserved_bytes: int
    fits: bool
    fits_with_headroom: bool


@dataclasses.dataclass(frozen=True)
class Found:
    """The outcome of a search; 0 where not even one sample fits, ``None`` if it is not known.

    ``too_large`` is the smallest batch size that was seen not to fit.
    """

    largest: int | None
    recommended: int | None
    too_large: int | None
    tried: tuple[int, ...]


def search(
    known: Iterable[SimulatedBatch],
    measure: Callable[[Sequence[int]], Iterable[SimulatedBatch]],
    *,
    free_bytes: int,
    free_with_headroom_bytes: int,
    most: int,
    unit: int = 1,
) -> Found:
    """Close in on both limits by secants through the measured peaks.

    ``measure`` makes trials at the given batch sizes and may leave out those that failed: the
    search goes on below them. None is asked for twice, and none but multiples of ``unit`` up to
    ``most``.
    """
    trials = {trial.batch: trial for trial in known}
    asked = set(trials)
    goals: tuple[tuple[Callable[[SimulatedBatch], bool], int], ...] = (
        (lambda trial: trial.fits_with_headroom, free_with_headroom_bytes),
        (lambda trial: trial.fits, free_bytes),
    )
    left = MOST_TRIALS
    while left:
        failed = asked - trials.keys()
        guesses = (_next(trials, failed, good, free, most) or 0 for good, free in goals)
        whole = dict.fromkeys(guess - guess % unit for guess in guesses)
        wanted = [guess for guess in whole if guess and guess not in asked]
        if not wanted:
            break
        wanted = wanted[:left]
        left -= len(wanted)
        asked.update(wanted)
        trials.update((trial.batch, trial) for trial in measure(wanted))
    return found_by(trials.values())


def found_by(known: Iterable[SimulatedBatch]) -> Found:
    """The outcome where no more trials are made."""
    trials = {trial.batch: trial for trial in known}
    return Found(
        largest=_largest(trials, lambda trial: trial.fits),
        recommended=_largest(trials, lambda trial: trial.fits_with_headroom),
        too_large=_bracket(trials, lambda trial: trial.fits)[1],
        tried=tuple(sorted(trials)),
    )


def reach_of(known: Iterable[SimulatedBatch], free_bytes: int, most: int) -> int:
    """About the largest batch size for this memory, by the line through the largest two trials that
    fit: no further beyond them than a search would try at once, nor above ``most``; 0: none."""
    trials = {trial.batch: trial for trial in known}
    low, high = _bracket(trials, lambda trial: trial.fits_with_headroom)
    if not low:
        return 0
    guess = max(low, _secant(trials, free_bytes, low, high))
    return min(guess, _FURTHEST * low if high is None else high - 1, most)


def _largest(
    trials: dict[int, SimulatedBatch], good: Callable[[SimulatedBatch], bool]
) -> int | None:
    low, high = _bracket(trials, good)
    return low or (0 if high == 1 else None)


def _bracket(
    trials: dict[int, SimulatedBatch], good: Callable[[SimulatedBatch], bool]
) -> tuple[int, int | None]:
    """The largest good batch size below the smallest bad one (0: none); that bad one."""
    bad = [batch for batch, trial in trials.items() if not good(trial)]
    high = min(bad, default=None)
    low = max((b for b, t in trials.items() if good(t) and (high is None or b < high)), default=0)
    return low, high


def _next(
    trials: dict[int, SimulatedBatch],
    failed: set[int],
    good: Callable[[SimulatedBatch], bool],
    free: int,
    limit: int,
) -> int | None:
    """The next batch size to try for one of the limits; ``None`` if it is sufficiently close."""
    if not trials:
        return min(_FURTHEST, limit) if not failed else max(1, min(failed) // 2)
    low, high = _bracket(trials, good)
    above = [batch for batch in (high, *failed) if batch is not None and batch > low]
    high = min(above, default=None)
    if low >= limit or (high is not None and high - low <= max(1, int(low * _NARROW))):
        return None
    guess = _secant(trials, free, low, high)
    if high is None:
        # Peaks that jump make the line too steep: no step is narrower than what ends the search.
        return min(max(guess, low + max(1, int(low * _NARROW))), _FURTHEST * low, limit)
    # Each trial narrows the bracket by a quarter at least.
    margin = max(1, (high - low) // 4)
    return min(max(guess, low + margin), high - margin)


def _secant(trials: dict[int, SimulatedBatch], free: int, low: int, high: int | None) -> int:
    """The batch size at which the line through the two trials nearest to the limit meets the free
    memory."""
    ordered = sorted(trials)
    if len(ordered) < 2:
        return 2 * low if high is None else (low + high) // 2
    ends = [b for b in (low, high) if b in trials]
    if len(ends) < 2:
        ends = ordered[:2] if low == 0 else ordered[-2:]
    one, two = (trials[batch] for batch in ends)
    slope = (two.reserved_bytes - one.reserved_bytes) / (two.batch - one.batch)
    if slope <= 0:  # small tensors share segments: nothing is to be seen yet
        return _FURTHEST * low if high is None else (low + high) // 2
    return int(one.batch + (free - one.reserved_bytes) / slope)


def _timed_steps(trace: Trace) -> int:
    """Steps of a run that its time is told from."""
    steps = recording_of(trace).steps
    return min(steps, full_steps(trace) or steps)


class Attempts:
    """Runs at batch sizes of a job, timed on ``machine``; ``notes`` collects those that failed or
    were fed less."""

    def __init__(
        self, runs: Runs, memory_model: MemoryModel, machine: HostedGpu, notes: Notes
    ) -> None:
        self._runs = runs
        self._memory_model = memory_model
        self._machine = machine
        self._notes = notes
        self._made: dict[RunSpec, dict[int, Trace]] = {}
        self._failed: dict[RunSpec, set[int]] = {}

    def simulated(self, spec: RunSpec) -> dict[int, Trace]:
        """The runs that :meth:`made` gave."""
        return dict(self._made.get(spec, {}))

    def failed(self, spec: RunSpec) -> tuple[int, ...]:
        """The sizes that :meth:`made` could not give."""
        return tuple(sorted(self._failed.get(spec, ())))

    def trial(self, batch: int, trace: Trace) -> SimulatedBatch:
        stream = Stream.of(recording_of(trace))
        return SimulatedBatch(
            batch=batch,
            reserved_bytes=self._memory_model.unlimited(stream).peak_reserved,
            fits=self._memory_model.limited(stream).fits,
            fits_with_headroom=self._memory_model.leaves_margin(stream),
        )

    def trials(
        self,
        sizes: Sequence[int],
        batch: int,
        present: Trace,
        spec: RunSpec,
        paths: dict[int, Trace],
    ) -> Iterator[SimulatedBatch]:
        """Trials at ``sizes``, other than those whose steps run other code; ``paths`` gets all."""
        for size, trace in self.made(sizes, spec):
            paths[size] = trace
            if self.is_same_path(batch, present, size, trace):
                yield self.trial(size, trace)

    def made(self, batches: Sequence[int], spec: RunSpec) -> Iterator[tuple[int, Trace]]:
        """Runs at these batch sizes; those that failed or were fed less are noted, left out."""
        for batch in batches:
            self._runs.start(batch, spec)
        for batch in batches:
            try:
                trace = self._runs.trace(batch, spec)
            except ScriptError as error:
                self.note(f"batch size {batch} could not be simulated: {error.in_note}", CHANGES)
                if not isinstance(error, NotSimulated):  # which has a note of its own
                    self._failed.setdefault(spec, set()).add(batch)
                continue
            if is_full(trace, batch):
                self._made.setdefault(spec, {})[batch] = trace
                yield batch, trace
            else:
                self.note(
                    f"batch size {batch} was requested, the DataLoader returned fewer samples"
                )

    def peak(self, batch: int, spec: RunSpec) -> Replay | None:
        """The memory and step time of a batch size, from its own run."""
        for _, trace in self.made([batch], spec):
            return self._memory_model.limited(Stream.of(recording_of(trace)))
        return None

    def timed_curve(
        self,
        known: Mapping[int, Trace],
        batch: int,
        most: int,
        spec: RunSpec,
        noise_scale: float | None,
        trials_left: int,
        unit: int,
    ) -> Curve:
        """Steps up to ``most`` samples, from ``known`` runs of ``spec`` and as many more as
        needed, no more than ``trials_left``; of all of them over as many steps, for some may end
        early, at an evaluation."""
        bounds: list[int] = []
        traces: dict[int, Trace] = {}

        def measure(size: int) -> StepSpeed | None:
            trace = next((run for _, run in self.made([size], spec)), None)
            if trace is None:
                return None
            bounds.extend(filter(None, [most_timed(trace, size)]))
            traces[size] = trace
            return self._timed(trace, size)

        steps: dict[int, StepSpeed] = {}
        for size, trace in known.items():
            bounds.extend(filter(None, [most_timed(trace, size)]))
            if trace.recording is not None and is_full(trace, size):
                step = self._timed(trace, size)
                steps |= {size: step} if step is not None else {}
                traces[size] = trace
        if not steps:
            step = measure(min(batch, most))
            steps = {min(batch, most): step} if step is not None else {}
        if not steps:
            return Curve()
        least = functools.partial(min, bounds, default=None)
        # The launch line keeps a batch size that is about as fast as any: a smaller one is of use
        # where the noise scale asks for it.
        kept = 0 if noise_scale or batch not in steps or batch > most else batch
        found = refine(steps, most, measure, noise_scale, least, trials_left, unit, kept)
        shortest = min((number for size in found if (number := _timed_steps(traces[size])) > 1),
                       default=None)  # fmt: skip
        alike = {size: self._timed(traces[size], size, shortest) or found[size] for size in found}
        return curve_through(alike, most, unit)

    def _timed(self, trace: Trace, size: int, limit: int | None = None) -> StepSpeed | None:
        full = full_steps(trace)
        if limit is not None and full != 1:
            full = min(limit, full or limit)
        return timed(recording_of(trace), size, self._machine, full)

    def is_same_path(self, batch: int, present: Trace, size: int, trace: Trace) -> bool:
        """Do both runs go the same path, as far as it can be told? A first step lacks what the
        script does after a step."""
        one, other = full_part(present), full_part(trace)
        if other.steps < 2 <= one.steps:
            return True
        return not takes_other_path(batch, one, size, other)

    def note_other_paths(self, batch: int, paths: Mapping[int, Trace]) -> bool:
        parts = {size: full_part(path) for size, path in paths.items()}
        told = {s: part for s, part in parts.items() if not part.steps < 2 <= parts[batch].steps}
        said = other_path(batch, told)
        if said:
            self.note(said, CHANGES)
        return bool(said)

    def note(self, text: str, severity: Severity = "information") -> None:
        if text not in self._notes:
            self._notes.add(text, severity)


#: A bracket no wider than this share of the value is sufficiently narrow.
NARROW: Final = 1 / 64


def next_value(
    needs: Mapping[int, int], budget: int, low: int, high: int | None, step: int, furthest: int
) -> int | None:
    """A multiple of ``step`` between ``low``, the largest value that is good (0: none is), and
    ``high``, the smallest that is not (``None``: none yet); ``None``: these are close enough.

    ``needs`` are the bytes of each value that was looked at, and ``budget`` what they may be; no
    value beyond ``furthest`` times ``low`` is looked at.
    """
    if high is not None and high - low <= max(step, int(low * NARROW)):
        return None
    guess = predicted(needs, budget, low)
    if high is None:
        least = max(step, int(low * NARROW))
        if guess <= low:  # it was to be too large: further by more each time
            before = max((value for value in needs if value < low), default=0)
            least = max(least, low - before)
        guess = min(max(guess, low + least), furthest * max(low, 1))
    else:
        least = max(step, (high - low) // 8)
        if not low < guess < high:
            guess = (low + high) // 2
        guess = min(max(guess, low + least), high - min(least, (high - low) // 2))
    return max(guess // step * step, low + step)


def predicted(needs: Mapping[int, int], budget: int, near: int) -> int:
    """The value at which memory is about ``budget``: on the parabola through the three values of
    ``needs`` that come next to it (a line through two, in proportion from one)."""
    values = around(needs, budget)
    if len(values) == 1:
        return 2 * values[0] if needs[values[0]] <= budget else max(values[0] // 2, 1)
    if len(values) == 2 or _is_line(values, needs):
        one, two = values[0], values[-1]
        slope = (needs[two] - needs[one]) / (two - one)
        if slope <= 0:
            return 2 * max(values)
        return max(int(one + (budget - needs[one]) / slope), 1)
    square, line, base = np.polyfit(values, [needs[value] for value in values], 2)
    found = line * line - 4 * square * (base - budget)
    if found < 0:
        return max(near, 1)
    return max(int((-line + math.sqrt(found)) / (2 * square)), 1)


def bracket(needs: Mapping[int, int], budget: int) -> tuple[int, int]:
    """The largest value within the budget, and the smallest beyond it."""
    below = max(each for each in needs if needs[each] <= budget)
    return below, min(each for each in needs if needs[each] > budget)


def around(needs: Mapping[int, int], budget: int) -> list[int]:
    """The values next to the budget, up to three, in order: one on either side of it, and the next
    one."""
    below = [each for each in sorted(needs) if needs[each] <= budget]
    above = [each for each in sorted(needs) if needs[each] > budget]
    pair = [*below[-1:], *above[:1]]
    rest = sorted((each for each in needs if each not in pair),
                  key=lambda each: abs(needs[each] - budget))  # fmt: skip
    return sorted([*pair, *rest[: 3 - len(pair)]])


def _is_line(values: Sequence[int], needs: Mapping[int, int]) -> bool:
    """Do three values lie on a line, or below one (what the allocator rounds)?"""
    low, middle, high = (needs[value] for value in values)
    share = (values[1] - values[0]) / (values[2] - values[0])
    on_line = low + share * (high - low)
    return middle >= on_line * (1 - 1e-3)
