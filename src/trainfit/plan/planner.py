"""From a training command to a batch size that fits, with the reasons."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from trainfit.hardware import GpuSpec, catalogue
from trainfit.memory.affine import AffineStream, NotAffineError
from trainfit.memory.breakdown import by_kind, by_module
from trainfit.memory.fit import largest_batch
from trainfit.memory.replay import Replay, Stream, replay
from trainfit.plan.command import Command, other_precision
from trainfit.plan.failures import ScriptError, require_step
from trainfit.plan.tracing import Trace, Tracer
from trainfit.results.errors import TrainfitError
from trainfit.results.plan import Configuration, MemoryFigures, PlanResult
from trainfit.results.recording import Recording
from trainfit.simgpu.allocator import AllocatorSettings

#: Simulated runs at a time; each is a process that computes on one core.
_PARALLEL = 2
#: A recommended batch from here on is rounded down to a multiple of this: tensor cores
#: work on tiles of 8, and a batch of round size loses at most 7 samples.
_ROUND = 8

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user set: see ``trainfit plan --help``. ``headroom`` is a share of the GPU."""

    headroom: float = 0.10
    steps: int = 3
    time_limit_s: float = 600.0


@dataclasses.dataclass(frozen=True)
class _Variant:
    """One precision of the job: its traces and the law for every batch size."""

    trace: Trace
    law: AffineStream | None
    why_no_law: str


def plan(
    command: Command,
    gpu: GpuSpec,
    gpu_name: str,
    settings: Settings,
    progress: Progress = lambda text: None,
) -> PlanResult:
    """Plan ``command`` for ``gpu``; ``gpu_name`` is what the user called it.

    Raises :class:`ScriptError` where the script gives nothing to plan with.
    """
    started = time.monotonic()
    with Tracer(
        command,
        gpu_name,
        gpu_memory_bytes=gpu.memory_bytes,
        steps=settings.steps,
        time_limit_s=settings.time_limit_s,
    ) as tracer:
        planner = _Planner(command, gpu, settings, tracer, progress)
        result = planner.run()
    return dataclasses.replace(result, seconds=time.monotonic() - started)


class _Planner:
    def __init__(
        self,
        command: Command,
        gpu: GpuSpec,
        settings: Settings,
        tracer: Tracer,
        progress: Progress,
    ) -> None:
        self._command = command
        self._gpu = gpu
        self._settings = settings
        self._tracer = tracer
        self._progress = progress
        self._allocator = AllocatorSettings.from_environment(os.environ)
        self._notes: list[str] = []
        self._loader_index: int | None = None

    def run(self) -> PlanResult:
        self._progress(f"simulating {self._command.name} on {self._gpu.key}")
        first = self._tracer.trace()
        require_step(first, self._command)
        batch = self._present_batch(first)
        here, other = self._variants(first, batch)
        now = self._configure(here, batch)
        best = now.recommended_batch
        recommended = None
        if here.law is not None and best:
            recommended = self._figures(replay(here.law.at(best), settings=self._allocator))
        return PlanResult(
            command=self._command.line(),
            gpu=self._gpu.key,
            gpu_memory_bytes=self._gpu.memory_bytes,
            headroom=self._settings.headroom,
            steps=first.outcome.steps,
            now=now,
            recommended=recommended,
            other_amp=self._configure(other, batch) if other is not None else None,
            basis="two traces" if here.law is not None else "one trace",
            basis_detail=here.why_no_law,
            launch=self._launch(best, batch),
            assumptions=self._assumptions(here),
            notes=tuple(self._notes),
            other_gpus=self._other_gpus(here, now),
            gpu_sources=dict(self._gpu.sources),
            environment=_environment(first),
            seconds=0.0,
        )

    # -- traces ----------------------------------------------------------------------------

    def _present_batch(self, trace: Trace) -> int | None:
        """The batch size now: the placeholder's, else that of the loader of the first step."""
        loader = trace.outcome.loader
        self._loader_index = loader["index"] if loader is not None else None
        if "batch_size" in self._command.present:
            return int(self._command.present["batch_size"])
        if loader is None or not loader["batch_size"]:
            return None
        return int(loader["batch_size"])

    def _variants(self, first: Trace, batch: int | None) -> tuple[_Variant, _Variant | None]:
        """The job as it is, and with autocast the other way round."""
        with ThreadPoolExecutor(_PARALLEL) as pool:
            second = pool.submit(self._second, first, batch, {}, None)
            values, force = self._other_amp(first)
            flipped = pool.submit(self._try_trace, batch, values, force)
            here = self._law(first, batch, second, ({}, None))
            other = flipped.result()
            if isinstance(other, str):
                self._notes.append(f"autocast the other way round was not simulated: {other}")
                return here, None
            second = pool.submit(self._second, other, batch, values, force)
            return here, self._law(other, batch, second, (values, force))

    def _other_amp(self, first: Trace) -> tuple[Mapping[str, str], str | None]:
        """Placeholder values and forced switch for the other precision."""
        if "amp" in self._command.present:
            return {"amp": other_precision(self._command.present["amp"])}, None
        return {}, "off" if first.outcome.autocast else "on"

    def _second(
        self, first: Trace, batch: int | None, values: Mapping[str, str], force: str | None
    ) -> tuple[Trace, int] | str:
        """A trace at another batch size, or why there is none."""
        if batch is None:
            return (
                "the batch size is not known: no DataLoader with a batch size fed the first "
                "step; write {batch_size:N} into the command"
            )
        why = ""
        for other in _candidates(batch):
            self._progress(f"simulating at batch size {other}")
            trace = self._try_trace(other, values, force)
            if not isinstance(trace, str):
                return trace, other
            why = why or trace
        return f"no second batch size could be simulated: {why}"

    def _try_trace(
        self, batch: int | None, values: Mapping[str, str], force: str | None
    ) -> Trace | str:
        loader = None
        if "batch_size" in self._command.present:
            values = {**values, "batch_size": str(batch)}
        elif batch is not None and (index := self._loader_index) is not None:
            loader = (index, batch)
        trace = self._tracer.trace(values, loader=loader, amp=force)
        try:
            require_step(trace, self._command)
        except ScriptError as error:
            return str(error)
        return trace

    def _law(
        self,
        first: Trace,
        batch: int | None,
        second: Future[tuple[Trace, int] | str],
        found_by: tuple[Mapping[str, str], str | None],
    ) -> _Variant:
        found = second.result()
        if isinstance(found, str):
            return _Variant(first, None, found)
        assert batch is not None
        other, at = found
        base = first
        if batch == 1:
            # One sample has no strides to speak of, so the law is taken from larger batches.
            batch, third = at, self._try_trace(2 * at, *found_by)
            if isinstance(third, str):
                return _Variant(first, None, f"no third batch size could be simulated: {third}")
            base, other, at = other, third, 2 * at
        assert base.recording is not None and other.recording is not None
        try:
            law = AffineStream.between(base.recording, batch, other.recording, at)
        except NotAffineError as error:
            return _Variant(first, None, f"batch sizes {batch} and {at} do not compare: {error}")
        if not law.depends_on_batch:
            raise TrainfitError(
                f"the batch size has no effect: {batch} and {at} allocate the same; does the "
                "script use the option that holds {batch_size}?"
            )
        return _Variant(first, law, "")

    # -- figures ---------------------------------------------------------------------------

    def _configure(self, variant: _Variant, batch: int | None) -> Configuration:
        recording = variant.trace.recording
        assert recording is not None
        stream = Stream.of(recording)
        free = replay(stream, settings=self._allocator)
        limited = replay(
            stream,
            capacity_bytes=self._gpu.memory_bytes,
            context_bytes=self._gpu.context_bytes,
            settings=self._allocator,
        )
        shown = limited if limited.fits else free
        largest = recommended = None
        if variant.law is not None:
            largest, recommended = self._batches(variant.law)
        return Configuration(
            batch_size=batch,
            amp=variant.trace.outcome.autocast or "off",
            memory=self._figures(shown),
            fits=limited.fits,
            by_kind=by_kind(recording, stream, shown),
            by_module=by_module(recording, stream, shown),
            step_peak_allocated_bytes=tuple(peak for peak, _ in shown.step_peaks),
            largest_batch=largest,
            recommended_batch=recommended,
        )

    def _batches(self, law: AffineStream) -> tuple[int, int]:
        """Largest batch that runs, and the largest that leaves the headroom free."""
        context = self._gpu.context_bytes
        largest = largest_batch(law, self._gpu.memory_bytes, context, self._allocator)
        usable = int(self._gpu.memory_bytes * (1 - self._settings.headroom))
        recommended = largest_batch(law, usable, context, self._allocator) if largest else 0
        if recommended > _ROUND:
            recommended -= recommended % _ROUND
        return largest, recommended

    def _figures(self, outcome: Replay) -> MemoryFigures:
        low, high = self._gpu.context_range_bytes
        return MemoryFigures(
            allocated_bytes=outcome.peak_allocated,
            reserved_bytes=outcome.peak_reserved,
            device_bytes=outcome.peak_reserved + self._gpu.context_bytes,
            context_bytes=self._gpu.context_bytes,
            context_range_bytes=(low, high),
        )

    # -- the rest --------------------------------------------------------------------------

    def _launch(self, best: int | None, batch: int | None) -> str:
        if "batch_size" in self._command.present and best:
            return self._command.line(batch_size=str(best))
        if best and best != batch:
            self._notes.append(
                f"the command has no {{batch_size}}: set the DataLoader's batch_size to {best}"
            )
        return self._command.line()

    def _other_gpus(self, here: _Variant, now: Configuration) -> tuple[str, ...]:
        """GPUs of the catalogue that run the job when this one cannot, smallest first."""
        if now.fits or here.trace.recording is None:
            return ()
        stream = Stream.of(here.trace.recording)
        need = replay(stream, settings=self._allocator).peak_reserved
        able = [g for g in catalogue() if need + g.context_bytes <= g.memory_bytes]
        able.sort(key=lambda g: (g.memory_bytes, g.key))
        return tuple(g.key for g in able)

    @staticmethod
    def _assumptions(variant: _Variant) -> dict[str, int]:
        recording: Recording | None = variant.trace.recording
        return dict(recording.header["assumptions"]) if recording is not None else {}


def _candidates(batch: int) -> list[int]:
    """Batch sizes for a second trace, in the order of preference.

    Not 1: with one sample, strides are trivially contiguous and copies disappear.
    """
    wanted = [2 * batch, batch + 1, batch - 1, batch // 2]
    return [b for i, b in enumerate(wanted) if b > 1 and b != batch and b not in wanted[:i]]


def _environment(trace: Trace) -> dict[str, str]:
    header = trace.recording.header if trace.recording is not None else {}
    return {
        "torch": str(header.get("torch", "")),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
