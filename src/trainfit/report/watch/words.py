"""What bounds a run, its phases and findings, in words."""

from __future__ import annotations

from typing import Final

from trainfit.results.format import duration, percent, rate, size, three_digits
from trainfit.results.text import printable
from trainfit.results.watch.result import (
    OTHERS_CORES,
    USABLE_CORES,
    Evidence,
    Finding,
    WatchResult,
)

#: The parts of a step as they are called on a screen.
PHASES: Final = {
    "input": "waiting for batches",
    "copy": "copies to the GPU",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "sync": "waiting for the GPU",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "other": "other Python code",
}
_LIMITS: Final = {
    "gpu": "The GPU is the limit",
    "input": "The DataLoader is the limit",
    "host": "The Python process that launches kernels is the limit",
    "script": "The script's own code is the limit",
    "copy": "Copies to the GPU are the limit",
    "sync": "Synchronizations with the GPU are the limit",
    "checkpoint": "Writing checkpoints is the limit",
    "communication": "Waiting for other ranks is the limit",
    "cpu": "Computing on the CPU is the limit",
    "unknown": "The limit of the run could not be determined",
}


def answer(result: WatchResult) -> str:
    """The verdict in one line."""
    if not result.steps:
        return "No training step was recorded"
    speed = ""
    if result.step_s:
        speed = f": median step {duration(result.step_s)}"
        if result.samples_per_s is not None:
            speed += f", {rate(result.samples_per_s)} samples/s"
    return _LIMITS[result.limit] + speed + _why(result)


def _why(result: WatchResult) -> str:
    """The figure behind the limit, in brackets."""
    if result.limit == "cpu":
        others = next((each for each in result.findings if each.kind == "cpu_contention"), None)
        busy = others and others.value_of(OTHERS_CORES)
        usable = others and others.value_of(USABLE_CORES)
        if busy is not None and usable is not None:
            return f" (other programs use {busy:.1f} of {usable:g} cores)"
    if result.limit == "input":
        waits = next((each.share for each in result.phases if each.name == "input"), None)
        if waits is not None:
            return f" ({percent(waits)} of the time goes to waiting for batches)"
    if result.limit == "script":
        waits = next((each.share for each in result.findings if each.kind == "script_waits"), None)
        if waits is not None:
            return f" (it waits {percent(waits)} of the time)"
        rest = next((each.share for each in result.phases if each.name == "other"), None)
        if rest is not None:
            return f" ({percent(rest)} of the time goes to {PHASES['other']})"
    if result.gpu_busy is None:
        return ""
    if result.limit == "gpu":
        return f" (busy {percent(result.gpu_busy)} of the time)"
    return f" (the GPU is busy {percent(result.gpu_busy)} of the time)"


def evidence_text(each: Evidence) -> str:
    """ "waiting for batches 41 ms/step"."""
    return f"{printable(each.what)} {_value(each)}"


def _value(each: Evidence) -> str:
    unit, _, per = each.unit.partition("/")
    suffix = f"/{per}" if per else ""
    if unit in ("s", "ms"):
        seconds = each.value if unit == "s" else each.value / 1e3
        return duration(seconds) + suffix
    if unit in ("B", "bytes"):
        return size(round(each.value)) + suffix
    if not each.unit and 0 < abs(each.value) < 1:
        return percent(each.value)
    return f"{three_digits(each.value)} {printable(each.unit)}".rstrip()


def title(finding: Finding) -> str:
    """With the rank and the share of the time that it costs."""
    text = printable(finding.title)
    if finding.rank is not None and f"ank {finding.rank}" not in text:
        text += f" (rank {finding.rank})"
    if not finding.share or "of the time" in text:
        return text
    return f"{text}, {percent(finding.share)} of the time"


def setting_text(finding: Finding) -> str:
    """ "num_workers=4", or the line to write; empty: neither."""
    if finding.settings:
        return " ".join(f"{printable(k)}={printable(v)}" for k, v in finding.settings.items())
    return printable(finding.line)
