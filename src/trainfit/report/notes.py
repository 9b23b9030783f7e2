"""Notes and findings: what each is about, how often it was made, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Final

from trainfit.findings.training.learning import KINDS as LEARNING
from trainfit.lint.mistakes import SPOILS
from trainfit.report.blocks import TONES, WHOLE, Item, Items, items, rows
from trainfit.report.steps import pattern_notes
from trainfit.results.configuration import BatchLimits, Configuration, EpochEnd
from trainfit.results.files.contents import Note, complete
from trainfit.results.files.contents import Severity as NoteSeverity
from trainfit.results.findings import ACCUMULATION_CHANGES, SAMPLING, Finding, Severity
from trainfit.results.memory import MemoryFigures
from trainfit.results.plan import PlanResult
from trainfit.results.runs.generation import Generation
from trainfit.results.runs.script import Protection
from trainfit.results.speed import GpuComparison
from trainfit.results.text import count, size

#: Lines of the user's code that a note names.
_LINES = 3
#: Parts of a path that are left where room is scarce: the file and its folder.
_PARTS = 2


def profile_note(profile: str) -> list[str]:
    """The note on the calibration profile that was used; nothing without one."""
    return [f"CUDA context and libraries from the profile {profile}"] if profile else []


def plain(texts: Iterable[str]) -> list[Note]:
    """Texts of which nothing is known but that they are notes."""
    return complete((), texts, {})


def comparison_notes(result: GpuComparison) -> list[Note]:
    """Notes on a job on other GPUs; first that its memory is not that of a whole run."""
    unseen = f"memory is that of training: {result.unseen}" if result.unseen else ""
    whole = [Note("note", unseen, severity="changes the figures")] if unseen else []
    return [*whole, *plain(result.notes)]


def note_text(note: Note, *, short: bool = False) -> str:
    """A note on one line; ``short`` names files without their folders."""
    text = f"assumed: {note.text}" if note.kind == "assumption" else note.text
    lines = [short_place(line) if short else line for line in note.lines]
    shown = [*lines[:_LINES], *([f"{len(lines) - _LINES} more"] if len(lines) > _LINES else [])]
    parts = [f"{note.count}×"] if note.count > 1 else []
    parts += [f"at {', '.join(shown)}"] if shown else []
    return f"{text} ({', '.join(parts)})" if parts else text


def short_place(place: str) -> str:
    """``folder/file.py:31`` of ``/long/path/folder/file.py:31``."""
    return "/".join(PurePath(place).parts[-_PARTS:])


def plan_notes(result: PlanResult) -> list[Note]:
    """All notes of a plan as data, those that change the figures first."""
    unsettled: NoteSeverity = "changes the figures"
    if result.pattern is not None and result.pattern.course == "unknown":
        unsettled = "may change the figures"
    pattern = [Note("note", text, 1, (), unsettled) for text in pattern_notes(result.pattern)]
    pattern += generation_notes(result.generation)
    speed = result.speed.notes if result.speed is not None else ()
    texts = [*result.notes, *speed, *profile_note(result.profile)]
    found = complete([*pattern, *result.structured_notes], texts, result.assumptions)
    return [note for note in found if note.text not in _told_by_parts(result)]


def generation_notes(generation: Generation | None) -> list[Note]:
    """Notes that figures are for a part of the text only, and why."""
    if generation is None or not generation.reason:
        return []
    text = (
        f"figures are for {generation.known_tokens:,} of {generation.new_tokens:,} new tokens, "
        f"whose memory may be more at the end: {generation.reason}"
    )
    return [Note("note", text, severity="changes the figures")]


def _told_by_parts(result: PlanResult) -> list[str]:
    """Notes that the parts of the launch command say, too."""
    choice = result.amp_choice
    by_hand = any(part.name == "amp" and part.status == "by hand" for part in result.launch_parts)
    return [choice.by_hand] if by_hand and choice is not None else []


# ---
# Notes on the files that a script wrote in a simulated run.


def protection_notes(protection: Protection | None) -> list[str]:
    """Lines for the notes: none where the script wrote nothing and everything was protected."""
    if protection is None:
        return []
    return [*_kind(protection), *protection.notes]


def _kind(protection: Protection) -> list[str]:
    if protection.kind == "none":
        return ["the script's files were not protected (--allow-writes)"]
    parts = [_dropped(protection)] if protection.files or protection.removed else []
    if protection.kind == "redirection":
        how = "Python's file calls were redirected to a scratch layer"
        how += ", and Landlock refused other writes" if protection.guarded else ""
        parts.append(f"{how} ({protection.detail})" if protection.detail else how)
        if not protection.guarded:
            parts.append("files that C code writes by itself were not protected")
    elif protection.detail:
        parts.append(protection.detail)
    return ["; ".join(parts)] if parts else []


def _dropped(protection: Protection) -> str:
    wrote = f"the script wrote {count(protection.files, 'file')} ({size(protection.bytes)})"
    if protection.removed:
        wrote += f" and removed {protection.removed}" if protection.files else ""
    if not protection.files:
        wrote = f"the script removed {count(protection.removed, 'file')}"
    return f"{wrote} in a scratch layer: your files were not changed"


# ---
# Findings of any verb: a title, why, where, and what to do.


#: How much more dispensable than critical ones are a finding with its place and fix, and its cause.
_LESS: Final[dict[Severity, int]] = {"critical": 0, "warning": 0, "info": 34}
_CAUSE_LESS: Final[dict[Severity, int]] = {"critical": 0, "warning": 4, "info": 34}


def beyond_text(memory: MemoryFigures, there: int) -> str:
    """How far the interval goes beyond the GPU's memory, where what is predicted fits."""
    _, most = memory.device_range_bytes or (0, 0)
    return f" ({size(most)} by the upper end of its interval)" if most > there else ""


def spoilt_text(findings: Iterable[Finding]) -> str:
    """A clause that says that a fault of learning was found: who reads the first line alone is not
    to start it."""
    spoils = (*LEARNING, *SPOILS)
    wrong = any(finding.is_critical and finding.kind in spoils for finding in findings)
    return ", but it does not learn as it is meant to (see What is wrong)" if wrong else ""


def other_steps_text(findings: Iterable[Finding]) -> str:
    """Clauses on what a step's time is not of: calls of a model before the steps, later steps with
    more or fewer micro-batches; else empty."""
    said = {finding.kind: finding.subject for finding in findings}
    text = ""
    if drawn := said.get(SAMPLING):
        text += f"; without the sampling before the steps, {drawn}"
    if changed := said.get(ACCUMULATION_CHANGES):
        text += f"; {changed}"
    return text


def until_later_text(end: EpochEnd | None, limits: BatchLimits | None, now: Configuration) -> str:
    """Until when the largest batch size holds, where later epochs need more and their own largest
    is not known; else empty."""
    if end is None or end.later is None or (limits is not None and limits.evaluation is not None):
        return ""
    if not end.needs_more_than(now.memory.device_bytes):
        return ""
    return f" until {short_place(end.later)} (not known for the epochs after it)"


def finding_items(findings: Sequence[Finding], *, detail: int) -> Items | None:
    """The findings as they come; a screen has up to two fixes of those it has room for, ``detail``
    of the critical ones."""
    return items([_item(finding, detail) for finding in findings], "finding")


def _item(finding: Finding, detail: int) -> Item:
    own = detail + _LESS[finding.severity]
    cause = ("cause", finding.cause, detail + _CAUSE_LESS[finding.severity])
    place = ("at", str(finding.place) if finding.place is not None else "", own)
    fixes = [
        ("fix" if not number else "or", _fix(fix.action, fix.cost), WHOLE * (number > 1))
        for number, fix in enumerate(finding.fixes)
    ]
    return Item(
        finding.title,
        tone=TONES[finding.severity],
        rows=rows(cause, place, *fixes),
        detail=own,
    )


def _fix(action: str, cost: str) -> str:
    return f"{action} ({cost})" if cost else action
