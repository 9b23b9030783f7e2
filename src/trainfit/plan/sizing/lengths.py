"""The values of one tunable, such as a sequence's length: their cost, and the largest that fits.

A job's memory is looked at where it was simulated; what the simulated values need says only where
to look next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from trainfit.memory.affine import AffineStream
from trainfit.memory.capacity import context_parts, least_capacity
from trainfit.memory.replay import Stream, live_at, replay
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.tunables import LENGTHS, CommandError
from trainfit.plan.runs.batches import varying_shapes
from trainfit.plan.runs.failures import NotSimulated, ScriptError
from trainfit.plan.runs.options import LeftOption, no_such_option, size_option, with_options
from trainfit.plan.runs.processes import available_ram
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.plan.sizing.attempts import NARROW, around, bracket, next_value, predicted
from trainfit.plan.sizing.costing import memory_law, step_seconds
from trainfit.plan.sizing.curve import curve_of
from trainfit.plan.sizing.generation import OtherLengths
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.plan.sizing.planned_job import PlannedJob
from trainfit.results import text as words
from trainfit.results.gpus import total
from trainfit.results.plan import TunableLimit, TunablePoint, TunableSizes
from trainfit.results.runs.continuation import ended
from trainfit.results.runs.generation import generated_text
from trainfit.results.runs.recording import NotAffineError, Recording
from trainfit.results.runs.script import ScriptOption
from trainfit.results.runs.spec import RunSpec

# ---
# The RAM of runs at values of a tunable: which may be made without filling this machine's.
#
# Tensors of the simulated GPU have no data, but a model that the script makes on the CPU has: at a
# width that the GPU has no memory for, the RAM may be full first.


#: Share of the free RAM that a run may be expected to take; an expectation may be wrong.
_USABLE: Final = 0.8
#: Runs to tell growth from: with fewer, all that is seen to grow is taken for a square.
_CURVE: Final = 3


@dataclasses.dataclass(frozen=True)
class RamShortage:
    """A run at ``value`` would need about ``need_bytes`` of RAM; ``free_bytes`` can be taken."""

    value: int
    need_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return (
            f"not looked at beyond: a run at {self.value:,} would need about "
            f"{words.size(self.need_bytes)} of RAM here, {words.size(self.free_bytes)} are free"
        )


class HostRam:
    """What runs at values took, and what others would: by the curve through the largest values.

    ``available``: bytes of RAM that can be taken now (``None``: not known, nothing is limited).
    """

    def __init__(self, available: Callable[[], int | None] = available_ram) -> None:
        self._available = available
        self._peaks: dict[int, int] = {}

    def learn(self, value: int, peak_bytes: int) -> None:
        """A run at ``value`` took so much at its peak (0: not known)."""
        if peak_bytes:
            self._peaks[value] = peak_bytes

    def shortage(self, value: int) -> RamShortage | None:
        """Why no run may be made at ``value``; ``None``: it may."""
        free = self._available()
        if free is None or not self._peaks or value <= max(self._peaks):
            return None
        need = self._need(value)
        return RamShortage(value, need, free) if need > _USABLE * free else None

    def most(self, value: int, step: int) -> int:
        """The largest value up to ``value`` that has room, by halves, of those that are multiples
        of ``step`` above the largest one known."""
        low, high = max(self._peaks, default=value), value
        while high - low > step:
            middle = (low + high) // 2
            low, high = (middle, high) if self.shortage(middle) is None else (low, middle)
        return low // step * step

    def _need(self, value: int) -> int:
        """Bytes at a larger value than those known: no less than in proportion to the last
        growth."""
        known = sorted(self._peaks.items())[-_CURVE:]
        last, peak = known[-1]
        if len(known) == 1:
            return int(peak * (value / last) ** 2)
        before, less = known[-2]
        grown = max(peak - less, 0)
        if len(known) < _CURVE:
            return int(peak + grown * (value**2 - last**2) / (last**2 - before**2))
        line = peak + grown * (value - last) / (last - before)
        places, peaks = zip(*known, strict=True)
        square = float(np.polyval(np.polyfit(places, peaks, 2), value))
        return int(max(line, square))


# ---
# The search.


#: Simulated values at the most, in addition to those of the table: in the search for the largest
#: that fits, and in that for the largest with the margin.
_MOST_TRIALS: Final = (8, 4)
#: No trial goes further beyond the largest value that fits than by this factor; of what may be a
#: model's size, which the script makes in RAM first, by less.
_FURTHEST, _FURTHEST_OF_MODEL = 8, 2
#: Values are multiples of the largest power of two in the present one, of this at the most.
_STEP: Final = 64
#: Memory that differs by less is the same: the value has no more effect.
_ALIKE: Final = 0.002
#: Batch sizes of the table, in multiples of the present one.
_BATCHES: Final = (0.5, 1, 2, 4)
#: An exponent of growth from which it is the square's.
_SQUARE: Final = 1.5
#: Share of the GPU that a table's largest entry has to need, for the limit at its batch size.
_TELLING: Final = 0.25
#: Shares of the growth at the peak below which a kind of growth is not named.
_NAMED: Final = 0.05


@dataclasses.dataclass(frozen=True)
class SizedTunable:
    """A tunable of ``command``, which has its placeholder: its ``name``, and how its user knows
    it."""

    command: Command
    name: str
    shown: str


def tunable_to_size(
    command: Command, options: Sequence[ScriptOption], solve: str
) -> SizedTunable | None:
    """The tunable that ``solve`` names, or a length that the user marked; ``None``: neither.

    ``options`` are those of the script's parser. Raises :class:`CommandError` where what is asked
    for is not there.
    """
    name = solve or next((length for length in LENGTHS if length in command.present), "")
    if not name:
        return None
    if name in command.present:
        return SizedTunable(command, name, name)
    option = size_option(command, options, name)
    if isinstance(option, LeftOption):
        raise no_such_option(name, option)
    if int(option.present) < 1:
        raise CommandError(
            f"--solve {name}: {option.shown} is {option.present}; expected 1 or more"
        )
    return SizedTunable(with_options(command, [option]), name, option.shown)


def length_option(command: Command, options: Sequence[ScriptOption]) -> SizedTunable | None:
    """The length of the job's sequences, marked or not; ``None`` where no option says it."""
    with contextlib.suppress(CommandError):
        return tunable_to_size(command, options, "seq_len")
    return None


def tunable_sizes(
    job: PlannedJob, tunable: SizedTunable, spec: RunSpec, *, solves: bool
) -> TunableSizes:
    """What values of the tunable cost, and with ``solves`` the largest that fits.

    ``spec`` is the launched precision. Runs that cannot be made end the search with what is known.
    """
    command, name, shown = tunable.command, tunable.name, tunable.shown
    present = int(command.present[name])
    job.runs.use(command)
    search = _LengthSearch(job, name, shown, present, spec)
    found = TunableSizes(name, shown, present)
    try:
        search.look(present)
        if solves:
            found = search.solved(found)
        search.spread()
    except NotSimulated:  # the user's interrupt
        found = dataclasses.replace(found, reason="the search was interrupted")
    except ScriptError as error:
        found = dataclasses.replace(found, reason=error.in_note)
    sizes = search.told(found)
    job.runs.use(job.command)
    best = sizes.recommended or sizes.largest
    if best:
        sizes = dataclasses.replace(sizes, command=command.line(**{name: str(best)}))
    return sizes


@dataclasses.dataclass(frozen=True)
class _Simulated:
    """A run at a value of the tunable, at the present batch size."""

    value: int
    trace: Trace
    spec: RunSpec
    device_bytes: int
    """Reserved at the GPU's capacity (without an end where that is too small), and the context."""
    need_bytes: int
    """Reserved if memory had no end, and the context."""
    allocated_bytes: int
    """At the peak, likewise: small tensors share segments that are reserved."""
    fits: bool
    has_margin: bool

    @property
    def recording(self) -> Recording:
        return recording_of(self.trace)


class _LengthSearch:
    """Simulates a job at values of its tunable."""

    def __init__(self, job: PlannedJob, name: str, shown: str, present: int, spec: RunSpec) -> None:
        self._job, self._name, self._shown = job, name, shown
        self._present, self._spec = present, spec
        self._step = math.gcd(present, _STEP)
        self._most: int | None = None
        self._why_most = ""
        self._failed: dict[int, str] = {}
        self._trials: dict[int, _Simulated] = {}
        self._is_length = name in LENGTHS
        self._is_linear = False
        self._leasts: dict[int, int] = {}
        self._laws: dict[int, tuple[AffineStream | None, Mapping[int, float]]] = {}
        self._ram = HostRam()
        self._shortage: RamShortage | None = None

    # -- runs ----------------------------------------------------------------------------------

    def look(self, value: int) -> _Simulated | None:
        """The job at ``value``; ``None`` where the script fails with it."""
        if value in self._trials:
            return self._trials[value]
        if value in self._failed:
            return None
        try:
            trace, spec = self._largest(value)
        except NotSimulated:
            raise
        except ScriptError as error:
            if value == self._present:
                raise
            self._failed[value] = error.in_note
            return None
        model = self._model(recording_of(trace))
        # Of a long text its last calls: all of them are millions of events, replayed many times.
        stream = Stream.of(ended(recording_of(trace)))
        shown, fits = model.shown(stream)
        taken = shown.peak_reserved + model.context_bytes
        unlimited = model.unlimited(stream)
        need = unlimited.peak_reserved + model.context_bytes
        found = _Simulated(
            value,
            trace,
            spec,
            taken,
            need,
            unlimited.peak_allocated,
            fits,
            model.leaves_margin(stream),
        )
        self._trials[value] = found
        self._ram.learn(value, trace.outcome.peak_ram_bytes)
        self._bound(found)
        return found

    def _largest(self, value: int) -> tuple[Trace, RunSpec]:
        """The run at ``value`` with the data set's largest batch, which another value may cut
        elsewhere."""
        job, spec = self._job, self._at(value)
        if value == self._present:
            sized = job.sized(spec)
            return job.runs.trace(job.batch, sized), sized
        loader = job.first.outcome.loader
        if loader is not None:
            spec = dataclasses.replace(spec, look_at_samples_s=job.runs.look_at_samples_s)
        trace = job.runs.trace(job.batch, spec)
        shapes = varying_shapes(trace)
        if shapes is None or shapes.longest is None:
            return trace, spec
        sized = shapes.sized(spec)
        return job.runs.trace(job.batch, sized), sized

    def _at(self, value: int) -> RunSpec:
        if value == self._present:
            return self._spec
        values = {**self._spec.values, self._name: str(value)}
        return dataclasses.replace(self._spec, values=values, title=f"{self._shown} {value}")

    def _model(self, recording: Recording) -> MemoryModel:
        return dataclasses.replace(self._job.memory_model, context=context_parts(recording))

    def _bound(self, found: _Simulated) -> None:
        """What bounds the value from above: the model's positions, the longest sample."""
        if not self._is_length:
            return
        text, context = generated_text(found.recording), found.trace.outcome.context
        if text is not None:
            if text.limit is not None and text.prompt is not None and self._name != "seq_len":
                self._limit(text.limit - text.prompt, f"the model has {text.limit:,} positions")
            return
        if context.positions is not None and context.positions != found.value:
            self._limit(context.positions, f"the model has {context.positions:,} positions")
        if context.longest is not None and context.longest < found.value:
            self._limit(context.longest, f"the longest sequence has {context.longest:,} tokens")

    def _limit(self, limit: int, why: str) -> None:
        if limit >= 1 and (self._most is None or limit < self._most):
            self._most, self._why_most = limit, why

    # -- the search ----------------------------------------------------------------------------

    def solved(self, found: TunableSizes) -> TunableSizes:
        """The largest that fits, and the largest with the margin; both are simulated."""
        model = self._job.memory_model
        goals: tuple[tuple[Callable[[_Simulated], bool], Callable[[_Simulated], int], int], ...] = (
            (lambda each: each.fits, self._least, model.capacity_bytes),
            (lambda each: each.has_margin, lambda each: each.need_bytes, model.usable_bytes),
        )
        tests: tuple[Callable[[Stream], bool], ...] = (
            lambda stream: model.limited(stream).fits,
            model.leaves_margin,
        )
        for left, (good, need, budget), test in zip(_MOST_TRIALS, goals, tests, strict=True):
            told = self._text.largest(test, self._most, self._step) if self._text else 0
            for _ in range(left):
                value = self._next(good, need, budget, told)
                if value is None:
                    break
                self.look(value)
        fitting = [trial.value for trial in self._trials.values() if trial.fits]
        margin = [trial.value for trial in self._trials.values() if trial.has_margin]
        too_large = [trial.value for trial in self._trials.values() if not trial.fits]
        fitting = [each for each in fitting if each < min(too_large, default=each + 1)]
        if fitting and not too_large and not self._failed and self._most is None:
            why = (
                self._shortage or f"not looked at beyond: {len(self._trials)} values were simulated"
            )
            self._limit(max(fitting), str(why))
        return dataclasses.replace(
            found,
            largest=max(fitting, default=0),
            recommended=max((each for each in margin if each in fitting), default=0),
            too_large=min(too_large, default=None),
            reason=self._reason(),
        )

    def _reason(self) -> str:
        """A sentence on the first value at which the script fails; empty without one."""
        if not self._failed:
            return ""
        value, why = next(iter(self._failed.items()))
        return f"{self._shown} {value} could not be simulated: {why}"

    @functools.cached_property
    def _text(self) -> OtherLengths | None:
        """The present run's text, where the value is how long it gets; ``None``: it is not."""
        if not self._is_length:
            return None
        return OtherLengths.of(self._trials[self._present].recording, self._present)

    def _next(
        self,
        good: Callable[[_Simulated], bool],
        need: Callable[[_Simulated], int],
        budget: int,
        told: int = 0,
    ) -> int | None:
        """The value to simulate next; ``None``: the bracket is sufficiently narrow. ``told`` is
        about the largest that is good, where a text says it."""
        bad = [value for value, trial in self._trials.items() if not good(trial)]
        high = min([*bad, *self._failed], default=None)
        low = max(
            (v for v, trial in self._trials.items() if good(trial) and (high is None or v < high)),
            default=0,
        )
        maximum = self._most
        if maximum is not None and low >= maximum:
            return None
        if high is None and self._is_flat():
            return None
        needs = {value: need(trial) for value, trial in self._trials.items()}
        furthest = _FURTHEST if self._is_length else _FURTHEST_OF_MODEL
        guess = next_value(needs, budget, low, high, self._step, furthest)
        if guess is None:
            return None
        guess = next(
            (value for value in self._around(told) if low < value < (high or value + 1)), guess
        )
        if maximum is not None:
            guess = min(guess, maximum)
        self._shortage = self._ram.shortage(guess)
        if self._shortage is not None:
            guess = self._ram.most(guess, self._step)
        if guess in self._trials or guess in self._failed or (high is not None and guess >= high):
            return None
        return guess

    def _around(self, told: int) -> Sequence[int]:
        """``told``, and the next value that is far enough to say that it is too large."""
        beyond = told + max(self._step, int(told * NARROW))
        return (told, beyond // self._step * self._step) if told else ()

    def _least(self, trial: _Simulated) -> int:
        """The least memory of a GPU that ``trial`` fits: between what it allocates and reserves."""
        if trial.value not in self._leasts:
            device = self._model(trial.recording).device
            self._leasts[trial.value] = least_capacity(Stream.of(ended(trial.recording)), device)
        return self._leasts[trial.value]

    def _is_flat(self) -> bool:
        """Has the value no effect, as far as two runs show?"""
        values = sorted(self._trials)[-2:]
        if len(values) < 2:
            return False
        low, high = (self._trials[value].allocated_bytes for value in values)
        if abs(high - low) > _ALIKE * low:
            return False
        self._limit(values[-1], f"more than {values[0]:,} needs no more memory")
        return True

    # -- the table ------------------------------------------------------------------------------

    def spread(self) -> None:
        """Try the half and the double, too, for the table."""
        wanted = [self._present // 2, 2 * self._present]
        if self._most is not None:
            wanted = [min(each, self._most) for each in wanted]
        for value in wanted:
            is_new = not any(_is_near(value, other) for other in self._trials)
            if value >= 1 and is_new and self._ram.shortage(value) is None:
                self.look(value)

    def told(self, found: TunableSizes) -> TunableSizes:
        """The same sizes with the table, and what the memory's growth is made of."""
        growth, share, module = self._growth()
        self._is_linear = growth == "linear"
        kept = [each for each in (self._present, found.largest, found.too_large) if each]
        rows = _few(sorted(self._trials), kept) if self._trials else []
        points = [point for value in rows for point in self._row(value)]
        return dataclasses.replace(
            found,
            points=tuple(points),
            limit=self._most,
            limit_reason=self._why_most,
            limits=tuple(self._limits(points)),
            growth=growth,
            quadratic_bytes=share,
            quadratic_in=module,
        )

    def _row(self, value: int) -> Iterator[TunablePoint]:
        """A value at several batch sizes, from runs at two of them; else at the present one."""
        trial, batch = self._trials[value], self._job.batch
        law, times = self._law(trial)
        sizes: list[int | None] = [batch]
        if law is not None and batch is not None:
            sizes = [*sorted({max(1, int(batch * factor)) for factor in _BATCHES})]
        model = self._model(trial.recording)
        context = total(model.context)[0]
        for size in sizes:
            if size == batch or law is None or size is None:
                seconds = step_seconds(trial.recording, self._job.machine)
                yield TunablePoint(value, batch, trial.device_bytes, trial.fits, seconds)
                continue
            stream = law.at(size) if self._text is None else self._text.stream_at(law, size, value)
            shown, fits = model.shown(stream)
            device = shown.peak_reserved + context
            yield TunablePoint(value, size, device, fits, times.get(size), is_simulated=False)

    def _law(self, trial: _Simulated) -> tuple[AffineStream | None, Mapping[int, float]]:
        """Memory at every batch size, and the time of a step at some; from one more run. A text of
        another value is the present one, continued: its law is the present one's, without times."""
        if trial.value != self._present and self._text is not None:
            return self._law(self._trials[self._present])[0], {}
        if trial.value not in self._laws:
            self._laws[trial.value] = self._law_of(trial)
        return self._laws[trial.value]

    def _law_of(self, trial: _Simulated) -> tuple[AffineStream | None, Mapping[int, float]]:
        job, batch = self._job, self._job.batch
        if batch is None or not job.pairs:
            return None, {}
        pair = []
        try:
            for size in job.pairs[0]:
                run = trial.trace if size == batch else job.runs.trace(size, trial.spec)
                pair.append((size, recording_of(run)))
            law = memory_law(pair)
        except (ScriptError, NotSimulated, NotAffineError):
            return None, {}
        maximum = max(max(1, int(batch * factor)) for factor in _BATCHES)
        steps = curve_of(pair, job.machine, maximum).steps
        return law, {step.batch_size or 0: step.seconds for step in steps}

    def _limits(self, points: Sequence[TunablePoint]) -> Iterator[TunableLimit]:
        """About the largest value at each batch size of the table."""
        by_batch: dict[int, dict[int, int]] = {}
        for point in points:
            if point.batch_size is not None:
                by_batch.setdefault(point.batch_size, {})[point.value] = point.device_bytes
        for batch, needs in sorted(by_batch.items()):
            if batch == self._job.batch or len(needs) < 2:
                continue
            capacity = self._job.memory_model.capacity_bytes
            near = around(needs, capacity)
            if self._is_linear and needs[near[0]] <= capacity < needs[near[-1]]:
                near = [v for v in near if v in bracket(needs, capacity)]
            most = predicted({value: needs[value] for value in near}, capacity, 0)
            by_model = self._most is not None and most >= self._most
            value = self._most if by_model and self._most is not None else most
            value = value // self._step * self._step if not by_model else value
            # Where only small values were looked at, nothing is said.
            tells = by_model or max(needs.values()) >= _TELLING * capacity
            if tells and 0 < value <= 2 * max(needs):
                yield TunableLimit(batch, value, by_model)

    def _growth(self) -> tuple[str, int, str]:
        """How memory at the peak grows with the value; of the present peak, the bytes that do with
        the square, and the module that has most of them."""
        values = sorted(self._trials)
        if len(values) < 2:
            return "", 0, ""
        low = self._trials[self._present]
        other = self._trials[max(v for v in values if v != self._present)]
        return growth_between(low.recording, low.value, other.recording, other.value)


def growth_between(
    first: Recording, value: int, second: Recording, other: int
) -> tuple[str, int, str]:
    """How memory at the peak of ``second`` differs from ``first``'s, tensor by tensor: "linear",
    "quadratic", "mixed" (empty: they run other operators); of ``first``, the bytes of tensors that
    grow with the square, and the module that has most of them."""
    one, two = first.simulated or first, second.simulated or second
    steps = min(one.steps, two.steps)
    one, two = one.first_steps(steps), two.first_steps(steps)
    if not np.array_equal(one.alloc_op, two.alloc_op):
        return "", 0, ""
    larger = two if other > value else one
    stream = Stream.of(larger)
    live = live_at(stream, replay(stream).peak_event)
    before, after = one.alloc_bytes[live].astype(float), two.alloc_bytes[live].astype(float)
    grows = (before > 0) & (after > 0) & (before != after)
    if not grows.any():
        return "", 0, ""
    exponent = np.log(after[grows] / before[grows]) / math.log(other / value)
    is_square = exponent > _SQUARE
    gained = np.abs(after[grows] - before[grows])
    share = float(gained[is_square].sum() / gained.sum())
    kind = "linear" if share < _NAMED else "quadratic" if share > 1 - _NAMED else "mixed"
    if kind == "linear":
        return kind, 0, ""
    square = live[grows][is_square]
    modules: dict[str, float] = {}
    for place, size in zip(one.alloc_module[square].tolist(), one.alloc_bytes[square].tolist(),
                           strict=True):  # fmt: skip
        path = one.strings[place] if place >= 0 else ""
        modules[path] = modules.get(path, 0) + size
    most = max(modules, key=lambda path: modules[path])
    return kind, int(one.alloc_bytes[square].sum()), most


def _is_near(value: int, other: int) -> bool:
    return abs(value - other) <= value // 8


def _few(values: Sequence[int], kept: Collection[int]) -> list[int]:
    """The values that are ``kept``, and others up to five: the smallest, the largest, some
    between."""
    ends = [values[0], values[-1], *values]
    wanted = dict.fromkeys(value for value in (*kept, *ends) if value in values)
    return sorted(list(wanted)[: max(5, len(kept))])
