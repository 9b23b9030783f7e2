"""A diagnosis as text: bad checks with their fixes, unknown ones, good ones."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from trainfit.report.gpus.live_figures import gpus_now_text
from trainfit.report.machine.script import script_text
from trainfit.results.format import duration
from trainfit.results.machine.doctor import Check, DoctorResult, Fix, Verdict
from trainfit.results.text import printable, wrapped

MARKS: dict[Verdict, str] = {"bad": "BAD", "cannot_tell": "?", "good": "ok"}
_NAME = 18
#: So many good checks, as of `--only`, are shown with their figures on the screen, too.
_FEW = 3
#: So many unknown checks are shown with what they need, where none is bad.
_FEW_UNKNOWN = 2
#: How the checks of one GPU begin.
_GPU = re.compile(r"GPU (\d+) \([^)]*\): ")
#: Of what lies below a check's first line.
_INDENT = " " * 6


def doctor_screen(result: DoctorResult) -> str:
    """As :func:`doctor_text`, with good checks by name only, unknown ones in short where there is
    more to read, and not what each GPU does now."""
    return doctor_text(result, whole=False)


def doctor_text(result: DoctorResult, *, whole: bool = True) -> str:
    """The whole diagnosis; bad news first, each group in the order of the checks."""
    parts = [_headline(result)]
    for verdict in ("bad", "cannot_tell", "good"):
        checks = [check for check in result.checks if check.verdict == verdict]
        if verdict == "good" and not whole and len(checks) > _FEW:
            parts.append(_good_names(checks))
        elif verdict == "cannot_tell" and not whole and _is_long(result):
            parts.append(_unknown_summaries(checks))
        elif checks:
            texts = _good_texts(checks) if verdict == "good" else map(check_text, checks)
            parts.append(("\n\n" if verdict == "bad" else "\n").join(texts))
    if whole and (gpus := result.machine.gpus.value):
        parts.append(gpus_now_text(gpus))
    if result.script is not None:
        parts.append(script_text(result.script))
    return "\n\n".join(parts)


def _is_long(result: DoctorResult) -> bool:
    verdicts = [check.verdict for check in result.checks]
    unknown = verdicts.count("cannot_tell")
    return unknown > _FEW_UNKNOWN or (unknown > 0 and "bad" in verdicts)


def _unknown_summaries(checks: Sequence[Check]) -> str:
    lines = [_first_lines(check) for check in checks]
    return "\n".join([*lines, _field("needed", "--explain says it")])


def check_text(check: Check) -> str:
    """One check: a line, and what is needed to act on it unless it is good."""
    lines = [_first_lines(check)]
    if check.verdict == "good":
        return lines[0]
    if check.why:
        lines.append(_field("why" if check.verdict == "bad" else "needed", check.why))
    if check.verdict == "bad":
        lines.append(_field("cause", check.cause))
        for found in check.evidence:
            text = f"{found.what}: {found.value} ({found.source})"
            lines.append(_field("evidence", text))
    # Trying the fix may show what a check cannot tell.
    lines.extend(_fixes(check.fixes, "fix" if check.verdict == "bad" else "to try"))
    return "\n".join(lines)


def _first_lines(check: Check) -> str:
    first = f"{MARKS[check.verdict]:<6}{printable(check.name).ljust(_NAME)}"
    return wrapped(printable(check.summary), first, " " * len(first))


def _good_texts(checks: Sequence[Check]) -> Iterator[str]:
    """A line a check; GPUs of which the same is said share one."""
    alike: dict[tuple[str, str], list[tuple[str, Check]]] = {}
    for check in checks:
        found = _GPU.match(check.summary)
        index, said = (found[1], check.summary[found.end() :]) if found else ("", check.summary)
        alike.setdefault((check.name, said), []).append((index, check))
    for (_, said), group in alike.items():
        check = group[0][1]
        if len(group) > 1:
            indices = ", ".join(index for index, _ in group)
            check = dataclasses.replace(check, summary=f"GPUs {indices}: {said}")
        yield check_text(check)


def _good_names(checks: Sequence[Check]) -> str:
    """In a paragraph; what PyTorch sees of GPUs, the question that most people have, in words."""
    lines = [check_text(check) for check in checks if check.name == "gpu"]
    names = dict.fromkeys(printable(check.name) for check in checks if check.name != "gpu")
    if names:
        first = f"{MARKS['good']:<6}"
        text = f"{', '.join(names)} (figures: --explain)"
        lines.append(wrapped(text, first, " " * len(first)))
    return "\n".join(lines)


def _headline(result: DoctorResult) -> str:
    counts = dict.fromkeys(MARKS, 0)
    for check in result.checks:
        counts[check.verdict] += 1
    return (
        f"{counts['bad']} bad, {counts['cannot_tell']} unknown, {counts['good']} good "
        f"({duration(result.seconds)})"
    )


def _fixes(fixes: Sequence[Fix], label: str) -> list[str]:
    lines: list[str] = []
    for fix in fixes:
        # Commands are to be copied: they are never broken into lines.
        lines.append(_label(label) + printable(fix.command))
        lines.append(_label("undo") + printable(fix.undo))
        lines.append(_field("cost", fix.cost))
    return lines


def _field(label: str, text: str) -> str:
    first = _label(label)
    return wrapped(printable(text), first, " " * len(first))


def _label(label: str) -> str:
    return _INDENT + label.ljust(_NAME)
