"""Memory figures of a recording."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from trainfit.memory.explain.breakdown import by_kind, by_module
from trainfit.memory.stream.device import context_parts, figures
from trainfit.memory.stream.growth import step_pattern
from trainfit.memory.stream.replay import UNLIMITED, Replay, Stream, replay
from trainfit.results.files.decoding import DecodingError, decode
from trainfit.results.files.errors import TrainfitError
from trainfit.results.files.notes import complete
from trainfit.results.memory.summary import RecordingSummary
from trainfit.results.runs.coverage import Coverage
from trainfit.results.runs.recording import STEP_END, Recording
from trainfit.results.runs.sandbox import Protection
from trainfit.simgpu.allocator.settings import AllocatorSettings

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
    others = int(header.get("other_processes_bytes") or 0)
    return RecordingSummary(
        file=file,
        gpu=str(header["gpu"]),
        gpu_memory_bytes=int(header["gpu_memory_bytes"]),
        torch=str(header["torch"]),
        steps=recording.steps,
        operators=len(recording.op_name),
        memory=figures(outcome, context_parts(recording)),
        by_kind_bytes=by_kind(recording, stream, outcome),
        by_module_bytes=by_module(recording, stream, outcome),
        step_peak_allocated_bytes=tuple(peak for peak, _ in outcome.step_peaks),
        timeline_bytes=timeline(stream, outcome),
        assumptions=assumptions,
        out_of_memory=out_of_memory or header.get("out_of_memory"),
        pattern=step_pattern(recording, reserved_bytes=outcome.peak_reserved),
        other_processes_bytes=others,
        profile=str(header.get("profile", "")),
        notes=tuple(map(str, header.get("notes", ()))),
        step=recording.makeup,
        structured_notes=tuple(complete((), map(str, header.get("notes", ())), assumptions)),
        protection=_told(Protection, header, "protection"),
        coverage=_told(Coverage, header, "coverage"),
    )


def replayed(recording: Recording, settings: AllocatorSettings | None = None) -> Replay:
    """The recording on its own GPU, as far as it was limited by it."""
    header = recording.header
    others = int(header.get("other_processes_bytes") or 0)
    return replay(
        Stream.of(recording),
        capacity_bytes=int(header["gpu_memory_bytes"]) - others if header["limited"] else UNLIMITED,
        context_bytes=int(header["context_bytes"]),
        settings=settings or recorded_settings(recording),
    )


def _told(kind: type[_T], header: Mapping[str, Any], name: str) -> _T | None:
    """What else the header holds of the run; ``None`` where it does not."""
    try:
        return decode(kind, header[name])
    except (KeyError, DecodingError):
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
    ends = np.flatnonzero(stream.events % 4 == STEP_END)
    if len(ends) < 2:
        span = outcome.allocated_after
    else:
        span = outcome.allocated_after[ends[-2] + 1 : ends[-1]]
    parts = np.array_split(span, min(_POINTS, max(len(span), 1)))
    return tuple(int(part.max()) for part in parts if len(part))
