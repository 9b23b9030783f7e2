"""A diagnosis as text: bad checks with their fixes, unknown ones, good ones."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from trainfit.report.gpus.live_figures import gpus_now_text
from trainfit.report.machine.script import script_blocks, script_text
from trainfit.report.screen import Line, ScreenBlock, blank, block, lines_of, made, screen
from trainfit.results.format import duration
from trainfit.results.machine.doctor import Check, DoctorResult, Evidence, Fix, Verdict
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


def doctor_screen(result: DoctorResult) -> list[Line]:
    """At most 25 lines: what is bad and how to fix it, what a script has, what is unknown."""
    by_verdict = {verdict: [c for c in result.checks if c.verdict == verdict] for verdict in MARKS}
    bad, unknown, good = (by_verdict[verdict] for verdict in ("bad", "cannot_tell", "good"))
    found = result.script is not None and result.script.findings
    blocks = [block(_headline(result), style="bad" if bad else "title" if found else "good")]
    for number, check in enumerate(bad):
        blocks += _bad_blocks(check, number)
    if result.script is not None:
        blocks += [blank(91), *script_blocks(result.script)]
    blocks.append(blank(92))
    for number, check in enumerate(unknown):
        blocks += _unknown_blocks(check, number, len(unknown) <= _FEW_UNKNOWN and not bad)
    blocks.append(blank(93))
    if len(good) > _FEW:
        blocks.append(made(_good_names(good), 21))
    else:
        blocks += [made(check_text(check), 21) for check in good]
    return screen(blocks, "evidence, costs, figures of good checks", "finding")


def _bad_blocks(check: Check, number: int) -> list[ScreenBlock]:
    """What is bad and what fixes it go before why."""
    head = tuple(lines_of(_first_lines(check), "bad"))
    # A fix is never shown without its undo and what it costs.
    fixes = [
        made(_fixes([fix], "fix"), 10 + number + 40 * at) for at, fix in enumerate(check.fixes)
    ]
    return [
        ScreenBlock(head, min(number, 9), notes=1),
        *fixes,
        made(_field("why", check.why) if check.why else "", 41 + number),
        made(_field("cause", check.cause), 60 + number),
        *(made(_evidence(each), 70 + number) for each in check.evidence),
    ]


def _unknown_blocks(check: Check, number: int, few: bool) -> list[ScreenBlock]:
    needed = _field("needed", check.why) if few and check.why else ""
    tried = _fixes(check.fixes, "to try") if few else []
    return [
        made(_first_lines(check), 22 + number),
        made(needed, 80 + number),
        made(tried, 85 + number),
    ]


def doctor_lines(result: DoctorResult) -> list[Line]:
    """The whole diagnosis, with what is bad in the style of it."""
    return [
        Line(line, "bad" if line.startswith(MARKS["bad"]) else "plain")
        for line in doctor_text(result).split("\n")
    ]


def doctor_text(result: DoctorResult) -> str:
    """The whole diagnosis; bad news first, each group in the order of the checks."""
    parts = [_headline(result)]
    for verdict in ("bad", "cannot_tell", "good"):
        checks = [check for check in result.checks if check.verdict == verdict]
        if checks:
            texts = _good_texts(checks) if verdict == "good" else map(check_text, checks)
            parts.append(("\n\n" if verdict == "bad" else "\n").join(texts))
    if gpus := result.machine.gpus.value:
        parts.append(gpus_now_text(gpus))
    if result.script is not None:
        parts.append(script_text(result.script))
    return "\n\n".join(parts)


def check_text(check: Check) -> str:
    """One check: a line, and what is needed to act on it unless it is good."""
    lines = [_first_lines(check)]
    if check.verdict == "good":
        return lines[0]
    if check.why:
        lines.append(_field("why" if check.verdict == "bad" else "needed", check.why))
    if check.verdict == "bad":
        lines.append(_field("cause", check.cause))
        lines.extend(map(_evidence, check.evidence))
    # Trying the fix may show what a check cannot tell.
    lines.extend(_fixes(check.fixes, "fix" if check.verdict == "bad" else "to try"))
    return "\n".join(lines)


def _evidence(found: Evidence) -> str:
    return _field("evidence", f"{found.what}: {found.value} ({found.source})")


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
