"""From a training command to a batch size that fits, with the reasons."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import time
from collections.abc import Iterator, Sequence

from trainfit.hardware import GpuSpec, catalogue, device_constants
from trainfit.memory.affine import AffineStream, NotAffineError
from trainfit.memory.breakdown import by_kind, by_module
from trainfit.memory.device import context_parts
from trainfit.memory.fit import LARGEST
from trainfit.memory.growth import step_pattern
from trainfit.memory.replay import Replay, Stream
from trainfit.plan.command import Command, CommandError
from trainfit.plan.failures import ScriptError, is_inference, shortfall
from trainfit.plan.inference import gradients_both_ways
from trainfit.plan.judge import Judge
from trainfit.plan.launch import ACCELERATE, PRECISIONS, launch
from trainfit.plan.laws import memory_law
from trainfit.plan.remedies import try_remedies
from trainfit.plan.remedy_kinds import NAMES
from trainfit.plan.remedy_trials import Job
from trainfit.plan.runs import AS_WRITTEN, Progress, Runs, Variant
from trainfit.plan.search import Found, Trial, search
from trainfit.plan.speed import enough, speed, step_seconds
from trainfit.plan.tracing import Trace, Tracer, allocator_settings
from trainfit.results.constants import LIBRARIES, DeviceConstants, total
from trainfit.results.plan import (
    Basis,
    BatchLimits,
    Configuration,
    HostCpu,
    PlanResult,
    Recorded,
    Remedies,
)
from trainfit.results.recording import Recording
from trainfit.results.words import count
from trainfit.simgpu.settling import LEAST_STEPS

#: A recommended batch from here on is rounded down to a multiple of this: tensor cores
#: work on tiles of 8, and a batch of round size loses at most 7 samples.
_ROUND = 8


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user set: see ``trainfit plan --help``.

    ``headroom`` is a share of the GPU (``None``: as much as the figures may be too low);
    ``steps`` of ``None`` are until memory has settled.
    ``remedies`` are names of remedies to try; ``None``: all where the job does not fit. ``cpu`` is
    the processor beside the GPU.
    """

    headroom: float | None = None
    steps: int | None = None
    time_limit_s: float = 600.0
    remedies: tuple[str, ...] | None = None
    cpu: HostCpu | None = None

    @property
    def core_hz(self) -> float | None:
        """The clock of its cores, where that was said."""
        return self.cpu.core_hz if self.cpu is not None else None


@dataclasses.dataclass(frozen=True)
class _Batches:
    """What is known of other batch sizes; ``recommended_peak`` is what the recommended takes.

    ``basis_detail`` says why, where ``basis`` is not "two traces"; ``law`` is there where it is,
    and ``pair`` the recordings that it is from.
    """

    basis: Basis
    basis_detail: str = ""
    largest: int | None = None
    recommended: int | None = None
    recommended_peak: Replay | None = None
    law: AffineStream | None = None
    pair: tuple[tuple[int, Recording], ...] = ()
    limits: BatchLimits | None = None

    @property
    def useful(self) -> int | None:
        """The largest that leaves the headroom, else the largest that fits."""
        return (self.limits.memory if self.limits is not None else None) or self.largest


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
        recording = _recording(first)
        self._judge = dataclasses.replace(self._judge, context=context_parts(recording))
        if self._settings.headroom is None:
            self._judge = dataclasses.replace(self._judge, headroom=self._judge.margin(recording))
        self._notes += recording.header.get("notes", ())
        pairs = list(_pairs(batch, _most_full(first, batch))) if batch is not None else []
        flipped = self._flipped(first)
        self._start(batch, pairs, flipped)
        here = self._batches(first, batch, pairs, AS_WRITTEN, by_trial=True)
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
            assumptions=dict(_recording(first).header["assumptions"]),
            notes=tuple(self._notes),
            other_gpus=() if now.fits else self._other_gpus(first),
            gpu_sources=dict(self._gpu.sources),
            environment=_environment(first),
            seconds=0.0,
            remedies=remedies,
            inference=inference,
            pattern=step_pattern(_recording(first), reserved_bytes=now.memory.reserved_bytes),
            other_processes_bytes=self._constants.other_processes_bytes,
            profile=self._constants.profile,
            variables=variables,
            batch_in_command="batch_size" in self._command.present,
            samples=samples,
            speed=speed(
                recording,
                batch,
                self._gpu,
                here.pair,
                largest=here.useful,
                samples=samples,
                core_hz=self._settings.core_hz,
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
            self._runs.start(next(_pairs(batch, None))[1], AS_WRITTEN)
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
        peaks = [self._judge.shown(Stream.of(_recording(t)))[0] for t in (first, whole)]
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

    # -- batch sizes -----------------------------------------------------------------------

    def _batches(
        self,
        present: Trace,
        batch: int | None,
        pairs: Sequence[tuple[int, int]],
        variant: Variant,
        *,
        by_trial: bool,
    ) -> _Batches:
        """What is known of other batch sizes, from two of them if that is possible."""
        if batch is None:
            return _Batches(
                "one trace",
                "the batch size is not known: no DataLoader with a batch size fed the first "
                "step; write {batch_size:N} into the command",
            )
        why = "the data set is too small for two batch sizes with full batches only"
        for one, other in pairs:
            try:
                traces = self._runs.trace(one, variant), self._runs.trace(other, variant)
            except ScriptError as error:
                why = f"no other batch size could be simulated: {error}"
                continue
            try:
                pair = tuple(zip((one, other), map(_recording, traces), strict=True))
                law = memory_law(pair)
                self._check_law(law, variant)
            except NotAffineError as error:
                why = f"batch sizes {one} and {other} give no rule for others: {error}"
                if by_trial:
                    known = {batch: present, one: traces[0], other: traces[1]}
                    return self._by_trial(known, variant, why)
                break
            if not law.depends_on_batch:
                return self._without_effect(one, other)
            return self._by_law(law, pair)
        return _Batches("one trace", why)

    def _check_law(self, law: AffineStream, variant: Variant) -> None:
        """Compare a law that looks odd with a third batch size; raises ``NotAffineError``.

        What grows with the square of the batch size (a contrastive loss) gives a line too,
        but one that is below zero at batch size 0.
        """
        one, two = sorted(law.batches)
        below_zero = law.base < 0 if law.batches == (one, two) else law.base > 0
        below_zero[law.template.workspace_alloc] = False  # they have models of their own
        if not below_zero.any():
            return
        third = (one + two) // 2 if two - one > 1 else one - 1
        if third < 2:
            third = two + 1
        try:
            seen = _recording(self._runs.trace(third, variant)).alloc_bytes
        except ScriptError as error:
            raise NotAffineError(f"a third could not be simulated ({error})") from None
        expected = law.at(third).alloc_bytes
        differs = seen[: len(expected)] != expected[: len(seen)]
        if not differs.any():
            return
        name = law.template.strings[int(law.template.alloc_module[int(differs.argmax())])]
        where = f", first in {name}" if name else ""
        raise NotAffineError(f"sizes do not grow in proportion to the batch size{where}")

    def _by_law(self, law: AffineStream, pair: tuple[tuple[int, Recording], ...]) -> _Batches:
        """Exact for every batch size: the largest that runs, and that leaves the headroom; and
        the smallest of those that is about as fast as any."""
        judge = self._judge
        largest = judge.largest(law)
        most = _rounded(judge.largest(law, judge.usable_bytes) if largest else 0)
        fast = enough(pair, self._gpu, most, self._settings.core_hz) if most else None
        limits = BatchLimits(most, fast)
        best = min(most, limits.knee or most)
        peak = judge.limited(law.at(best)) if best else None
        return _Batches("two traces", "", largest, best, peak, law, pair, limits)

    def _by_trial(self, known: dict[int, Trace], variant: Variant, why: str) -> _Batches:
        """By simulating one batch size after the other."""
        context = self._judge.context_bytes
        loader = next(iter(known.values())).outcome.loader
        found = search(
            [self._trial(batch, trace) for batch, trace in known.items()],
            lambda batches: self._trials(batches, variant),
            free_bytes=self._judge.capacity_bytes - context,
            free_with_headroom_bytes=self._judge.usable_bytes - context,
            most=loader.samples if loader is not None and loader.samples else LARGEST,
        )
        best = found.recommended
        peak = None
        if best:
            peak = self._judge.limited(Stream.of(_recording(self._runs.trace(best, variant))))
        return _Batches(
            "one trace a batch size", f"{why}; {_tried(found)}", found.largest, best, peak
        )

    def _trials(self, batches: Sequence[int], variant: Variant) -> Iterator[Trial]:
        for batch in batches:
            self._runs.start(batch, variant)
        for batch in batches:
            try:
                trace = self._runs.trace(batch, variant)
            except ScriptError as error:
                self._notes.append(f"batch size {batch} could not be simulated: {error}")
            else:
                yield self._trial(batch, trace)

    def _trial(self, batch: int, trace: Trace) -> Trial:
        stream = Stream.of(_recording(trace))
        limited = self._judge.limited(stream)
        taken = limited.peak_reserved + self._judge.context_bytes
        return Trial(
            batch=batch,
            reserved_bytes=self._judge.unlimited(stream).peak_reserved,
            fits=limited.fits,
            fits_with_headroom=limited.fits and taken <= self._judge.usable_bytes,
        )

    def _without_effect(self, one: int, other: int) -> _Batches:
        what = f"the batch size has no effect: {one} and {other} allocate the same"
        if "batch_size" in self._command.present:
            raise CommandError(
                f"placeholder {{batch_size}}: {what}; put it into the option from which "
                f"{self._command.name} takes its batch size"
            )
        return _Batches(
            "one trace",
            f"{what} (the DataLoader takes its batches from elsewhere); "
            "write {batch_size:N} into the command",
        )

    # -- figures ---------------------------------------------------------------------------

    def _configure(self, trace: Trace, batch: int | None, batches: _Batches) -> Configuration:
        recording = _recording(trace)
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
            step_s=step_seconds(recording, self._gpu, self._settings.core_hz),
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
        batches = self._batches(trace, batch, pairs, flipped, by_trial=False)
        return self._configure(trace, batch, batches)

    def _remedies(
        self, batch: int | None, now: Configuration, here: _Batches, flipped: Variant
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

    def _note_batches(self, first: Trace, batch: int | None, here: _Batches) -> None:
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

    def _other_gpus(self, first: Trace) -> tuple[str, ...]:
        """GPUs of the catalogue on which the present batch size runs, smallest first."""
        need = self._judge.unlimited(Stream.of(_recording(first))).peak_reserved
        libraries = {part.name for part in self._judge.context}
        able = [
            gpu
            for gpu in catalogue()
            if need + total(device_constants(gpu).used(libraries))[0] <= gpu.memory_bytes
        ]
        able.sort(key=lambda gpu: (gpu.memory_bytes, gpu.key))
        return tuple(gpu.key for gpu in able)


def _most_full(first: Trace, batch: int | None) -> int | None:
    """The largest batch size at which every batch of the run is full; ``None``: any.

    A data set that is used up before the run ends gives a short last batch, after which
    nothing scales with the batch size.
    """
    loader = first.outcome.loader
    if loader is None or loader.samples is None or loader.batch_size != batch:
        return None
    # Other batch sizes are compared over the least number of steps.
    share = min(1.0, LEAST_STEPS / max(first.outcome.steps, 1))
    return loader.samples // max(math.ceil(loader.batches * share), 1)


def _pairs(batch: int, most: int | None) -> Iterator[tuple[int, int]]:
    """Pairs of batch sizes to derive the law from, in the order of preference.

    The present one is among them if it can. Not 1: with one sample, strides are trivially
    contiguous and copies disappear.
    """
    if batch > 1 and (most is None or batch <= most):
        found = [(batch, other) for other in (2 * batch, batch + 1, batch - 1, batch // 2)]
    elif batch == 1:
        found = [(2, 4), (2, 3)]
    else:
        assert most is not None
        found = [(most // 2, most), (most - 1, most)]
    for one, other in dict.fromkeys(found):
        if min(one, other) > 1 and one != other and (most is None or max(one, other) <= most):
            yield one, other


def _recording(trace: Trace) -> Recording:
    assert trace.recording is not None  # as ``require_step`` made sure
    return trace.recording


def _recorded(
    batch: int | None, recording: Recording, others: Sequence[tuple[int, Recording]]
) -> tuple[Recorded, ...]:
    """The job as it is, and the other batch sizes that its law is from."""
    kept = [Recorded.of(batch, recording)]
    return (*kept, *(Recorded.of(at, other) for at, other in others if at != batch))


def _rounded(batch: int) -> int:
    return batch - batch % _ROUND if batch > _ROUND else batch


def _tried(found: Found) -> str:
    """In words, how far a search by trial came."""
    batches = ", ".join(map(str, found.tried))
    text = f"simulated one by one: {batches}"
    if found.largest and found.too_large:
        return f"{text}; the largest lies between {found.largest} and {found.too_large - 1}"
    return text


def _environment(trace: Trace) -> dict[str, str]:
    return {
        "torch": str(_recording(trace).header["torch"]),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
