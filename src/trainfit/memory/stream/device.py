"""Device memory: what the allocator reserved, and what the process uses in addition."""

from __future__ import annotations

from collections.abc import Iterable

from trainfit.memory.stream.interval import bounds_of
from trainfit.memory.stream.replay import Replay
from trainfit.results.machine.constants import CONTEXT, Constant, total
from trainfit.results.memory.figures import MemoryFigures
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.recording_header import decode_context_parts


def context_parts(recording: Recording) -> tuple[Constant, ...]:
    """Memory outside the allocator: the context, and the libraries that the process used.

    Recordings of the first version know nothing but the sum.
    """
    parts = decode_context_parts(recording.header)
    if parts:
        return parts
    low, high = recording.header["context_range_bytes"]
    value = int(recording.header["context_bytes"])
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
