"""A watched run in words: its answer, a line while it runs, the live view."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from trainfit.findings.failure import KINDS
from trainfit.findings.ranking import ends, gain, headline
from trainfit.results.findings import Evidence, Finding, Place
from trainfit.results.text import count, duration, percent, printable, rate, size, three_digits
from trainfit.results.watch import (
    LEAST_STEPS,
    OTHERS_CORES,
    USABLE_CORES,
    WatchResult,
    are_enough,
)

# ---
# What bounds a run, its phases and findings, in words.


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
    """The verdict in one line: why the run failed, what spoils its result, or what costs most of
    its time, with the line of the script and what a fix may gain; else what limits the run."""
    first = headline(result.findings)
    if first is None:
        return limit_of(result)
    text = f"The run failed: {title(first)}" if first.kind in KINDS else title(first)
    if first.place is not None and not _names(text, first.place):
        text += f", at {printable(str(first.place))}"
    gained = gain(first)
    return f"{text}: {gained}" if gained else text


def _names(text: str, place: Place) -> bool:
    """Does a text have a line, or lines around it ("train.py:12-14")?"""
    several = re.search(rf"{re.escape(place.file)}:(\d+)-(\d+)", text)
    if several is not None:
        return int(several[1]) <= place.line <= int(several[2])
    return str(place) in text


def failure_of(result: WatchResult) -> Finding | None:
    """Why the run failed or stands still, if it does and that is known."""
    first = next(iter(result.findings), None)
    return first if first is not None and ends(first) else None


def nothing_found(result: WatchResult) -> str:
    """How much it says that a run has no findings; empty where it has some."""
    if result.steps < LEAST_STEPS or result.findings:
        return ""
    if not result.unknown:
        return "Nothing to fix was found."
    missing = count(len(result.unknown), "check")
    return f"Nothing to fix was found by the checks that had data; {missing} had none."


def limit_of(result: WatchResult) -> str:
    """The part of the step that limits the run, and its speed."""
    speed = ""
    if result.step_s:
        speed = f": median step {duration(result.step_s)}"
        if result.samples_per_s is not None:
            speed += f", {rate(result.samples_per_s)} samples/s"
    if not are_enough(result.steps, result.seconds) and result.limit == "unknown":
        few = f"{count(result.steps, 'steady step')}, {LEAST_STEPS} needed"
        return f"Too few steps to judge ({few}; let the script train for longer){speed}"
    return _LIMITS[result.limit] + speed + _why(result)


#: The script's own code that is in a forward or backward pass, whose time is no other phase's.
_IN_PASSES: Final = ("pass_code", "loop_over_elements")


def _why(result: WatchResult) -> str:
    """The figure behind the limit, in brackets."""
    if result.limit == "cpu":
        others = next(
            (finding for finding in result.findings if finding.kind == "cpu_contention"), None
        )
        busy = others and others.value_of(OTHERS_CORES)
        usable = others and others.value_of(USABLE_CORES)
        if busy is not None and usable is not None:
            return f" (other programs use {busy:.1f} of {usable:g} cores)"
    if result.limit == "input":
        waits = next((phase.share for phase in result.phases if phase.name == "input"), None)
        if waits is not None:
            return f" ({percent(waits)} of the time goes to waiting for batches)"
    if result.limit == "script":
        waits = next(
            (finding.share for finding in result.findings if finding.kind == "script_waits"), None
        )
        if waits is not None:
            return f" (it waits {percent(waits)} of the time)"
        rest = next((phase.share for phase in result.phases if phase.name == "other"), None)
        if rest is not None and not any(finding.kind in _IN_PASSES for finding in result.findings):
            return f" ({percent(rest)} of the time goes to {PHASES['other']})"
    if result.gpu_busy is None:
        return ""
    if result.limit == "gpu":
        return f" (busy {percent(result.gpu_busy)} of the time)"
    return f" (the GPU is busy {percent(result.gpu_busy)} of the time)"


def evidence_text(evidence: Evidence) -> str:
    """ "waiting for batches 41 ms/step"."""
    return f"{printable(evidence.what)} {_value(evidence)}"


def _value(evidence: Evidence) -> str:
    if isinstance(evidence.value, str):
        return printable(evidence.value)
    unit, _, per = evidence.unit.partition("/")
    suffix = f"/{per}" if per else ""
    if unit in ("s", "ms"):
        seconds = evidence.value if unit == "s" else evidence.value / 1e3
        return duration(seconds) + suffix
    if unit in ("B", "bytes"):
        return size(round(evidence.value)) + suffix
    if not evidence.unit and 0 < abs(evidence.value) < 1:
        return percent(evidence.value)
    return f"{three_digits(evidence.value)} {printable(evidence.unit)}".rstrip()


def title(finding: Finding) -> str:
    """A finding's title with the rank and the share of the time that it costs."""
    text = printable(finding.title)
    if finding.rank is not None and f"ank {finding.rank}" not in text:
        text += f" (rank {finding.rank})"
    if not finding.share or "of the time" in text:
        return text
    return f"{text}, {percent(finding.share)} of the time"


def setting_text(finding: Finding) -> str:
    """ "num_workers=4", or the line to write; empty: neither."""
    settings = finding.fix.settings
    if settings:
        return " ".join(f"{printable(k)}={printable(v)}" for k, v in settings.items())
    return printable(finding.fix.line)


def progress_line(result: WatchResult) -> str:
    """One line while the run goes on, for a terminal that cannot be redrawn."""
    failure = failure_of(result)
    if failure is not None:
        return f"failed: {title(failure)}" if failure.kind in KINDS else title(failure)
    if not result.steps or not result.step_s:
        return "no training step yet"
    text = f"{duration(result.step_s)} a step"
    shares = sorted(result.phases, key=lambda each: -each.share)[:2]
    text += "".join(f", {PHASES[share.name]} {percent(share.share)}" for share in shares)
    if result.gpu_utilization is not None:
        text += f", GPU {percent(result.gpu_utilization)}"
    if result.findings:
        text += f"; {title(result.findings[0])}"
    return text


# ---
# The live view of a run: the verdict, a bar of phases, strips of GPU and CPU, the finding.


_COLOURS: Final = {
    "input": "red",
    "copy": "magenta",
    "forward": "green",
    "backward": "blue",
    "optimizer": "cyan",
    "sync": "yellow",
    "checkpoint": "bright_magenta",
    "evaluation": "bright_blue",
    "other": "white",
}
_LEVELS: Final = "▁▂▃▄▅▆▇█"
_STRIP: Final = 48


def live_view(result: WatchResult | None, seconds: float, printed: str = "") -> RenderableType:
    """What is drawn again each second; ``printed`` is a line that the script has not ended."""
    head = Text(f"trainfit watch  {duration(seconds)}", style="dim")
    tail = [Text(printable(printed), overflow="ellipsis", no_wrap=True)] if printed else []
    if result is None or (not result.steps and failure_of(result) is None):
        return Group(*tail, head, Text("no training step yet"))
    parts: list[RenderableType] = [*tail, head, Text(answer(result), style="bold")]
    parts.append(_phase_bar(result))
    parts += _strips(result)
    if result.ledger is not None and result.ledger.points:
        parts.append(_memory(result))
    for finding in result.findings[:2]:
        style = {"critical": "bold red", "warning": "yellow", "info": "dim"}[finding.severity]
        setting = setting_text(finding)
        parts.append(Text(f"{title(finding)}{f' → {setting}' if setting else ''}", style=style))
    return Group(*parts)


def strip(values: Sequence[float | None]) -> str:
    """The last values, 0 to 1, as bars; a blank where nothing was measured."""
    shown = values[-_STRIP:]
    return "".join(
        " " if value is None else _LEVELS[min(7, max(0, int(8 * value)))] for value in shown
    )


def _phase_bar(result: WatchResult) -> Text:
    bar = Text()
    for each in result.phases:
        cells = round(_STRIP * each.share)
        bar.append("█" * cells, style=_COLOURS[each.name])
    bar.append("\n")
    for each in sorted(result.phases, key=lambda phase: -phase.share)[:4]:
        if each.share >= 0.01:
            bar.append("■ ", style=_COLOURS[each.name])
            bar.append(f"{PHASES[each.name]} {percent(each.share)}  ")
    return bar


def _strips(result: WatchResult) -> list[Text]:
    rows = []
    gpu = [each.gpu_utilization for each in result.timeline]
    if any(utilization is not None for utilization in gpu):
        now = next(utilization for utilization in reversed(gpu) if utilization is not None)
        rows.append(Text(f"GPU  {strip(gpu)} {percent(now)}", style="green"))
    cores = [each.cores_busy for each in result.timeline]
    maximum = result.header.usable_cores
    if maximum and any(core is not None for core in cores):
        shares = [None if core is None else core / maximum for core in cores]
        last = next(core for core in reversed(cores) if core is not None)
        text = f"CPU  {strip(shares)} {rate(last)} of {rate(maximum)} cores"
        rows.append(Text(text, style="cyan"))
    return rows


def _memory(result: WatchResult) -> Text:
    books = result.ledger
    assert books is not None
    point = books.points[-1]
    held = [(name, getattr(point, name)) for name in ("allocated", "cached", "beyond", "others")]
    text = ", ".join(f"{size(value)} {name}" for name, value in held if value)
    free = f", {size(point.free)} free" if point.free is not None else ""
    return Text(f"Memory  {text}{free}")
