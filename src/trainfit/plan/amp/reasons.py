"""Memory and time saved by mixed precision, with the reason if it is little."""

from __future__ import annotations

from typing import Final

from trainfit.memory.stream.replay import Replay, Stream
from trainfit.plan.amp.by_hand import place_of
from trainfit.plan.amp.kernels import PeakParts, StepParts, peak_parts, step_parts
from trainfit.plan.steps.speed import speed
from trainfit.results.format import duration, percent, size
from trainfit.results.runs.recording import Recording
from trainfit.speed.model.step import Machine

#: Savings below which it is said what stays: autocast at its best saves about half.
_LITTLE: Final = 0.25
#: A part of a peak or of a step that is named.
_NAMED: Final = 0.1


def memory_reason(off: tuple[Recording, Replay], half: tuple[Recording, Replay], dtype: str) -> str:
    """One line on the peak of allocated memory in both."""
    before, after = off[1].peak_allocated, half[1].peak_allocated
    saved = before - after
    if before <= 0:
        return ""
    text = f"{dtype} saves {size(saved)} of {size(before)} ({percent(saved / before)})"
    if saved < 0:
        text = f"{dtype} uses {size(-saved)} more than the {size(before)} without it"
    if saved >= _LITTLE * before:
        return text
    kept = _kept(peak_parts(half[0], Stream.of(half[0]), half[1]))
    return f"{text}: of the peak in {dtype}, {kept}" if kept else text


def _kept(parts: PeakParts) -> str:
    """What autocast does not make smaller, the largest first."""
    at = f" (most at {place_of(parts.promoted_at)})" if parts.promoted_at else ""
    named = {
        "parameters, gradients and optimizer state, which stay float32": parts.state,
        "copies that autocast casts": parts.casts,
        "results of operators that autocast runs in float32": parts.float32,
        f"results that are float32 because an operand is{at}": parts.promoted,
        "inputs and workspaces": parts.fixed,
    }
    return _shares(named, parts.total)


def time_reason(
    off: Recording, half: Recording, dtype: str, machine: Machine, batch: int | None = None
) -> str:
    """One line on a step's time in both, at batch size ``batch`` (``None``: not known)."""
    before, after = speed(off, None, machine), speed(half, None, machine)
    if before is None or after is None:
        return ""
    slow, fast = before.now.seconds, after.now.seconds
    at = "" if batch is None else f" at batch size {batch}"
    text = f"a step{at} needs {duration(fast)} instead of {duration(slow)} in {dtype}"
    if slow <= 0 or fast <= (1 - _LITTLE) * slow:
        return text
    parts, without = step_parts(half, machine), step_parts(off, machine)
    if parts is None or without is None:
        return text
    added = parts.casts - without.casts
    if after.now.bound == "launches":
        casts = f"{added} launches of casts are added, and " if added > 0 else ""
        return f"{text}: {casts}it is bound by launches"
    if after.now.bound == "host copies":
        return f"{text}: it is bound by copies between host and device"
    kept = _kept_time(parts)
    return f"{text}: of the kernels' time, {kept}" if kept else text


def _kept_time(parts: StepParts) -> str:
    named = {
        "the optimizer, which stays float32": parts.optimizer_s,
        "operators that autocast runs in float32": sum(parts.float32_s.values()),
        "casts": parts.casts_s,
    }
    return _shares(named, parts.gpu_s)


def _shares(named: dict[str, float] | dict[str, int], whole: float) -> str:
    large = sorted(named.items(), key=lambda each: -each[1])
    said = [f"{percent(part / whole)} are {name}" for name, part in large if part >= _NAMED * whole]
    return ", ".join(said)
