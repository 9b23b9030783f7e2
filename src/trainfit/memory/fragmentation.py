"""Fragmentation of the reserved memory, and the allocator setting that would reduce it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from trainfit.memory.replay import UNLIMITED, Replay, Stream, replay
from trainfit.results.memory import Fragmentation, SettingOutcome
from trainfit.results.text import MIB
from trainfit.simgpu.allocator.settings import (
    SIZE_CLASSES,
    VARIABLE,
    AllocatorSettings,
    knows,
)

#: Split limits in MiB and divisions that are tried: the values that PyTorch's notes on memory
#: management and its users' reports go by.
_SPLIT_LIMITS = (64, 128, 256, 512)
_DIVISIONS = (4, 8)
_THRESHOLD = 0.8
#: The collection works below a memory fraction only; this one leaves out next to nothing.
_FRACTION = 0.99
#: A setting helps if it saves this share of the present peak, and this much.
_WORTH_SHARE = 0.01
_WORTH_BYTES = 32 * MIB


def fragmentation(
    stream: Stream,
    outcome: Replay,
    *,
    capacity_bytes: int | None,
    context_bytes: int,
    settings: AllocatorSettings,
) -> Fragmentation:
    """The state of the caching allocator at the peak of allocated memory.

    ``outcome`` is the replay of ``stream`` with the same figures and settings (a capacity of
    ``None`` is no limit).
    """
    until = dataclasses.replace(stream, events=stream.events[: outcome.peak_event + 1])
    capacity = UNLIMITED if capacity_bytes is None else capacity_bytes
    stats = replay(
        until, capacity_bytes=capacity, context_bytes=context_bytes, settings=settings
    ).stats
    return Fragmentation(
        allocated_bytes=stats["allocated_bytes"],
        reserved_bytes=stats["reserved_bytes"],
        peak_reserved_bytes=outcome.peak_reserved,
        largest_free_block_bytes=stats["largest_free_block_bytes"],
        inactive_split_bytes=stats["inactive_split_bytes"],
        segments=stats["segments"],
    )


def compare_settings(
    stream: Stream,
    capacity_bytes: int,
    context_bytes: int,
    present: AllocatorSettings,
    *,
    torch: str = "",
) -> tuple[SettingOutcome, ...]:
    """Replays ``stream`` with the current settings (first) and with one of them changed that
    PyTorch ``torch`` has.

    Each is replayed at ``capacity_bytes``, where the allocator gives its cache back before
    it fails, and without a limit where it fails there.
    """
    outcomes = [_outcome("", present, stream, capacity_bytes, context_bytes)]
    for name, settings in _candidates(present, torch):
        if settings != present:
            outcomes.append(_outcome(name, settings, stream, capacity_bytes, context_bytes))
    return tuple(outcomes)


def best_setting(outcomes: tuple[SettingOutcome, ...]) -> SettingOutcome | None:
    """The one that helps most, if any: the job runs with it alone, or it saves memory.

    Of settings that do about as well, the one that is tried first.
    """
    present, *others = outcomes
    able = [each for each in others if each.fits or not present.fits]
    if not present.fits and any(each.fits for each in able):
        return min((each for each in able if each.fits), key=lambda each: each.reserved_bytes)
    worth = max(_WORTH_BYTES, int(_WORTH_SHARE * present.reserved_bytes))
    able = [each for each in able if present.reserved_bytes - each.reserved_bytes >= worth]
    if not able:
        return None
    least = min(each.reserved_bytes for each in able)
    return next(each for each in able if each.reserved_bytes - least < _WORTH_BYTES)


def _candidates(present: AllocatorSettings, torch: str) -> Iterator[tuple[str, AllocatorSettings]]:
    """Each a change of one setting, as one writes it."""
    change = dataclasses.replace
    yield "expandable_segments:True", change(present, expandable_segments=True)
    for mib in _SPLIT_LIMITS:
        if mib * MIB >= present.large_segment_bytes:
            yield f"max_split_size_mb:{mib}", change(present, max_split_bytes=mib * MIB)
    for divisions in _DIVISIONS:
        classes = (divisions,) * SIZE_CLASSES
        name = f"roundup_power2_divisions:{divisions}"
        yield name, change(present, roundup_power2_divisions=classes)
    if not knows("per_process_memory_fraction", torch):
        return  # without it the variable alone collects nothing
    fraction = min(present.per_process_memory_fraction, _FRACTION)
    yield (
        f"garbage_collection_threshold:{_THRESHOLD}",
        change(
            present,
            garbage_collection_threshold=_THRESHOLD,
            per_process_memory_fraction=fraction,
        ),
    )


def _outcome(
    name: str,
    settings: AllocatorSettings,
    stream: Stream,
    capacity_bytes: int,
    context_bytes: int,
) -> SettingOutcome:
    limited = replay(
        stream, capacity_bytes=capacity_bytes, context_bytes=context_bytes, settings=settings
    )
    shown = limited if limited.fits else replay(stream, settings=settings)
    conf = settings.to_conf()
    return SettingOutcome(
        setting=name,
        environment=f"{VARIABLE}={conf}" if conf else "",
        fits=limited.fits,
        allocated_bytes=shown.peak_allocated,
        reserved_bytes=shown.peak_reserved,
        retries=limited.retries,
        device_allocations_per_step=_in_last_step(shown),
    )


def _in_last_step(outcome: Replay) -> int | None:
    """Calls of cudaMalloc (or of its like) in the last step: each stops the GPU's work."""
    calls = outcome.step_device_allocations
    return calls[-1] - calls[-2] if len(calls) > 1 else None
