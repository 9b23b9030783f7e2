"""Builds the report of ``trainfit memory`` from one or two recordings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TypeVar

import numpy as np

from trainfit.findings.out_of_memory import MISTAKES, MOSTLY, of_first_step, of_full_memory
from trainfit.memory.capacity import DeviceCapacity, batch_law, context_parts, figures
from trainfit.memory.fragmentation import best_setting, compare_settings, fragmentation
from trainfit.memory.growth import step_pattern
from trainfit.memory.held import full_memory
from trainfit.memory.peak import by_kind, by_module, peak, phase_at, remaining
from trainfit.memory.replay import UNLIMITED, Replay, Stream
from trainfit.results.files.contents import complete
from trainfit.results.files.decoding import DecodingError, decode
from trainfit.results.files.errors import TrainfitError
from trainfit.results.findings import Finding
from trainfit.results.memory import BatchLaw, MemoryReport, OptimizerTable, RecordingSummary
from trainfit.results.runs.continuation import whole
from trainfit.results.runs.recording import PHASES, NotAffineError, Recording, gpu_of, step_ends
from trainfit.results.runs.script import Protection
from trainfit.results.runs.steps import Coverage
from trainfit.results.text import line_of
from trainfit.simgpu.allocator.settings import AllocatorSettings

# ---
# Memory figures of a recording.


_T = TypeVar("_T")

#: Points of the line "memory over the step".
_POINTS = 200


def summarize(
    recording: Recording,
    file: str,
    *,
    settings: AllocatorSettings | None = None,
    out_of_memory: str | None = None,
    outcome: Replay | None = None,
) -> RecordingSummary:
    """Figures, breakdown and course of one recording, replayed at its GPU's capacity.

    ``settings`` and ``out_of_memory`` are those of the recording if they are not given;
    ``outcome`` is that of :func:`replayed` where it is known already.
    """
    header = recording.header
    assumptions = dict(header["assumptions"])
    if outcome is None:
        outcome = replayed(recording, settings)
    stream = outcome.stream
    others = header.get("other_processes_bytes") or 0
    notes = (*(header.get("notes") or ()), *_whose(recording, outcome))
    full = out_of_memory or header.get("out_of_memory")
    # A run whose first allocation was refused has no peak.
    held = peak(recording, stream, outcome).largest if len(recording.events) else ()
    at_peak = [each for each in held if each.kind != "workspace"]
    return RecordingSummary(
        file=file,
        gpu=header["gpu"],
        gpu_memory_bytes=header["gpu_memory_bytes"],
        torch=header["torch"],
        steps=recording.steps,
        operators=len(recording.op_name),
        memory=figures(outcome, context_parts(recording)),
        by_kind_bytes=by_kind(recording, stream, outcome),
        by_module_bytes=by_module(recording, stream, outcome),
        step_peak_allocated_bytes=tuple(peak for peak, _ in outcome.step_peaks),
        timeline_bytes=timeline(stream, outcome),
        assumptions=assumptions,
        out_of_memory=full,
        largest=at_peak[0] if at_peak else None,
        pattern=step_pattern(recording, reserved_bytes=outcome.peak_reserved),
        other_processes_bytes=others,
        profile=str(header.get("profile", "")),
        notes=notes,
        step=recording.makeup,
        structured_notes=tuple(complete((), notes, assumptions)),
        protection=_told(Protection, header.get("protection")),
        coverage=_told(Coverage, header.get("coverage")),
        findings=_of_run(recording, outcome) if full is None else _of_full(recording, outcome),
    )


def _of_run(recording: Recording, outcome: Replay) -> tuple[Finding, ...]:
    """Findings of a run that fits: what it did, and what fills memory that nobody means to."""
    of_memory = of_full_memory(full_memory(recording, outcome))
    by_mistake = tuple(finding for finding in of_memory if finding.kind in MISTAKES)
    return (*_told_findings(recording), *by_mistake)


def _of_full(recording: Recording, outcome: Replay) -> tuple[Finding, ...]:
    """Findings of a run that filled the GPU: first what by itself did, then what the memory is
    of."""
    findings = _told_findings(recording)
    first = tuple(finding for finding in findings if finding.is_critical)
    of_memory = of_full_memory(full_memory(recording, outcome))
    phases = recording.op_phase
    if not recording.steps and len(phases) and phases[-1] == PHASES.index("optimizer"):
        in_step = of_first_step(by_kind(recording, outcome.stream, outcome))
        of_memory = (in_step, *(each for each in of_memory if each.kind != MOSTLY))
    return (*first, *of_memory, *(finding for finding in findings if not finding.is_critical))


def _whose(recording: Recording, outcome: Replay) -> tuple[str, ...]:
    """Which of a process's GPUs the figures are of; nothing where it has one."""
    used = len(np.unique(gpu_of(recording.alloc_stream)))
    why = "needs the most" if outcome.fits else "runs out of memory first"
    note = f"of the {used} GPUs of the process, memory is that of GPU {outcome.gpu}, which {why}"
    return (note,) if used > 1 else ()


def replayed(recording: Recording, settings: AllocatorSettings | None = None) -> Replay:
    """The recording on its own GPU, as far as it was limited by it; what a text needs that does
    not fit is told of a GPU that it fits."""
    header = recording.header
    others = header.get("other_processes_bytes") or 0
    device = DeviceCapacity(
        header["gpu_memory_bytes"] - others if header["limited"] else UNLIMITED,
        header["context_bytes"],
        settings or recorded_settings(recording),
    )
    replay = device.replay(Stream.of(recording))
    if replay.fits or recording.simulated is None:
        return replay
    return device.needed(replay.stream)


def _told(kind: type[_T], told: object) -> _T | None:
    """What else the header holds of the run; ``None`` where it does not."""
    try:
        return decode(kind, told)
    except DecodingError:
        return None


def recorded_settings(recording: Recording) -> AllocatorSettings:
    """The allocator's settings during the run; the defaults where they were not recorded."""
    conf = recording.header.get("alloc_conf") or ""
    try:
        return AllocatorSettings.from_conf(conf)
    except ValueError as error:
        raise TrainfitError(
            f"the recording's allocator settings are invalid ({error}); re-record it"
        ) from None


def timeline(stream: Stream, outcome: Replay) -> tuple[int, ...]:
    """Allocated bytes over the last whole step: the peak of each of equal parts."""
    ends = step_ends(stream.events)
    if len(ends) < 2:
        span = outcome.allocated_after
    else:
        span = outcome.allocated_after[ends[-2] + 1 : ends[-1]]
    parts = np.array_split(span, min(_POINTS, max(len(span), 1)))
    return tuple(int(part.max()) for part in parts if len(part))


class ExplainError(TrainfitError):
    """Recordings that cannot be explained, or not together; one line."""


@dataclasses.dataclass(frozen=True)
class RecordingSource:
    """A recording, the name of its file, and its batch size where that is known."""

    recording: Recording
    file: str
    batch_size: int | None


def source(path: Path, batch_size: int | None = None) -> RecordingSource:
    """Read a recording; ``batch_size`` outranks what it says of itself.

    Raises ``ResultFileError``, and :class:`ExplainError` for a recording of nothing.
    """
    recording = whole(Recording.load(path))
    if not len(recording.alloc_bytes):
        raise ExplainError(f"recording {str(path)!r}: nothing was allocated on the GPU")
    return RecordingSource(recording, str(path), batch_size or recording.header.get("batch_size"))


def explain(first: RecordingSource, second: RecordingSource | None = None) -> MemoryReport:
    """Explain ``first``; with ``second``, also how memory grows with the batch size.

    Raises :class:`ExplainError` where the two do not belong together.
    """
    recording, header = first.recording, first.recording.header
    device = device_of(recording)
    stream = Stream.of(recording)
    shown, fits = device.shown(stream)
    full = header.get("out_of_memory")
    batches = _batches(first, second, device) if second is not None else None
    settings = compare_settings(
        stream,
        device.capacity_bytes,
        device.context_bytes,
        device.settings,
        torch=header["torch"],
    )
    other_run, other_file = ("", "") if second is not None else second_run(first)
    return MemoryReport(
        file=first.file,
        gpu=header["gpu"],
        gpu_memory_bytes=header["gpu_memory_bytes"],
        torch=header["torch"],
        batch_size=first.batch_size,
        memory=figures(shown, context_parts(recording)),
        fits=fits and full is None,
        step=recording.makeup,
        peak=peak(recording, stream, shown),
        remaining=remaining(recording, stream, shown),
        optimizers=_optimizers(recording),
        pattern=step_pattern(recording, reserved_bytes=shown.peak_reserved),
        fragmentation=fragmentation(
            stream,
            shown,
            capacity_bytes=device.capacity_bytes if fits else None,
            context_bytes=device.context_bytes,
            settings=device.settings,
        ),
        settings=settings,
        best_setting=best_setting(settings),
        batches=batches,
        second_run=other_run,
        second_file=other_file,
        timeline_bytes=timeline(stream, shown),
        timeline_phases=_phases(recording, len(timeline(stream, shown))),
        notes=tuple(_notes(first)),
        assumptions=dict(header["assumptions"]),
        findings=_findings(recording, shown, fits=fits)
        if full is None
        else _of_full(recording, shown),
        out_of_memory=full,
        coverage=_told(Coverage, header.get("coverage")),
    )


def _findings(recording: Recording, shown: Replay, *, fits: bool) -> tuple[Finding, ...]:
    """What the run was found to do wrong, and what fills the memory; of a job that fits, what
    should not be there."""
    findings = of_full_memory(full_memory(recording, shown))
    full = (finding for finding in findings if not fits or finding.kind != MOSTLY)
    return (*_told_findings(recording), *full)


def _told_findings(recording: Recording) -> tuple[Finding, ...]:
    """What the recorded run was found to do wrong."""
    return _told(tuple[Finding, ...], recording.header.get("findings")) or ()


def second_run(first: RecordingSource) -> tuple[str, str]:
    """The command that records the same script at twice the batch size, and its file; empty if
    unknown."""
    header = first.recording.header
    command = header.get("template")
    if command is None or first.batch_size is None:
        return "", ""
    batch = 2 * first.batch_size
    output = Path(first.file).with_name(f"batch-{batch}.trainfit")
    words = ["trainfit", "simulate", "--gpu", header["gpu"], "--batch-size", str(batch)]
    return f"{line_of([*words, '--output', str(output)])} -- {command}", str(output)


def _batches(first: RecordingSource, second: RecordingSource, device: DeviceCapacity) -> BatchLaw:
    _check_pair(first, second)
    assert first.batch_size is not None and second.batch_size is not None
    pair = first.batch_size, second.batch_size
    try:
        return batch_law(first.recording, pair[0], second.recording, pair[1], device)
    except NotAffineError as error:
        scripts = [each.recording.header.get("script") for each in (first, second)]
        if None in scripts:
            raise ExplainError(
                f"recordings {first.file!r} and {second.file!r}: {error}; record one script "
                "twice, with `trainfit simulate`"
            ) from None
        return BatchLaw("none", (min(pair), max(pair)), str(error))


def _check_pair(first: RecordingSource, second: RecordingSource) -> None:
    """Raise unless the two are of one script on one GPU at two batch sizes."""
    one, two = first.recording, second.recording
    names = f"recordings {first.file!r} and {second.file!r}"
    for key, what in (("gpu", "GPUs"), ("script", "scripts"), ("torch", "versions of PyTorch")):
        values = [each.header.get(key) for each in (one, two)]
        if None not in values and _name(key, values[0]) != _name(key, values[1]):
            raise ExplainError(
                f"{names} differ in their {what}, {values[0]!r} and {values[1]!r}; "
                "record one script on one GPU at two batch sizes"
            )
    for each in (first, second):
        if each.batch_size is None:
            raise ExplainError(
                f"recording {each.file!r} has no batch size; give both, as in --batch-size 8,16"
            )
        if not each.recording.steps:
            raise ExplainError(
                f"recording {each.file!r} has no complete optimizer step to "
                "compare; record it at a batch size that fits"
            )
    if first.batch_size == second.batch_size:
        raise ExplainError(
            f"{names} have the same batch size, {first.batch_size}; record one of them at "
            f"another: {second_run(first)[0] or 'its script accepts it'}"
        )


def _name(key: str, value: object) -> object:
    return Path(str(value)).name if key == "script" else value


def device_of(recording: Recording) -> DeviceCapacity:
    """The recorded GPU, less what other processes held, with the recorded allocator settings."""
    header = recording.header
    return DeviceCapacity(
        header["gpu_memory_bytes"] - (header.get("other_processes_bytes") or 0),
        header["context_bytes"],
        recorded_settings(recording),
    )


def _optimizers(recording: Recording) -> OptimizerTable | None:
    from trainfit.memory.optimizers import optimizer_table  # the one part that needs torch

    return optimizer_table(recording)


def _phases(recording: Recording, points: int) -> tuple[str, ...]:
    """The phase in the middle of each part of the timeline."""
    ends = step_ends(recording.events)
    span = np.arange(len(recording.events))
    if len(ends) > 1:
        span = span[ends[-2] + 1 : ends[-1]]
    parts = np.array_split(span, points)
    return tuple(phase_at(recording, int(part[len(part) // 2])) for part in parts if len(part))


def _notes(first: RecordingSource) -> list[str]:
    notes = []
    if first.recording.steps == 0:
        notes.append("no optimizer step was completed: the peak covers what ran until then")
    return notes
