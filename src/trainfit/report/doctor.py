"""A diagnosis as text: checks with their fixes, the processor; findings in a script, as SARIF."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from trainfit.doctor.cores import CoreGroup, Span, core_groups
from trainfit.hardware.machine.parsing import cpu_list_text
from trainfit.report.layout import (
    Line,
    ScreenBlock,
    blank,
    block,
    clipped,
    lines_of,
    made,
    screen,
    table_rows,
)
from trainfit.report.live_figures import gpus_now_text
from trainfit.results.doctor import Check, DoctorResult, ScriptReport, Verdict
from trainfit.results.findings import Evidence, Finding, Fix
from trainfit.results.machine import Cpu, Fact, IdleState
from trainfit.results.text import count, duration, printable, wrapped
from trainfit.version import __version__

# ---
# What the static reading of a script found, as text.


_SCRIPT_INDENT = " " * 4


def script_text(report: ScriptReport) -> str:
    """Findings by file and line: where, the line as it stands, the reason, what to write."""
    lines = [wrapped(_title(report), "", "  ")]
    for finding in _ordered(report):
        lines += ["", *_finding(finding)]
    if report.unread:
        lines += [""] if report.findings else []
        lines += [
            wrapped(f"not read: {printable(each)}", "  ", _SCRIPT_INDENT) for each in report.unread
        ]
    return "\n".join(lines)


def script_blocks(report: ScriptReport) -> list[ScreenBlock]:
    """The same for the screen: where, and what to write, before the reason."""
    found = [block(_title(report), style="title")]
    for number, finding in enumerate(_ordered(report)):
        place, source, reason, rewrite = (lines_of(part) for part in _finding(finding))
        found += [
            ScreenBlock((*place, *source, *rewrite), 2 + 2 * number, notes=1),
            ScreenBlock(tuple(reason), 50 + number),
        ]
    for each in report.unread:
        found.append(made(wrapped(f"not read: {printable(each)}", "  ", _SCRIPT_INDENT), 20))
    return found


def _title(report: ScriptReport) -> str:
    read = count(len(report.files), "file")
    if report.findings:
        names = {each.at.file for each in report.findings}
        where = f" in {count(len(names), 'file')}" if len(names) > 1 else ""
        title = f"{count(len(report.findings), 'finding')}{where}; {read} read"
    else:
        title = f"nothing found; {read} read"
    return f"Script {printable(report.script)}: {title}"


def _ordered(report: ScriptReport) -> list[Finding]:
    """In the order in which the files were read."""
    order = {name: number for number, name in enumerate(report.files)}
    return sorted(
        report.findings,
        key=lambda f: (order.get(f.at.file, len(order)), f.at.file, f.at.line, f.at.column),
    )


def _finding(finding: Finding) -> list[str]:
    place = f"{printable(finding.at.file)}:{finding.at.line}:{finding.at.column}"
    source = printable(finding.at.source.expandtabs(4).strip())
    # The user's own line, whose place is above it.
    return [
        f"  {place} {printable(finding.kind)}",
        clipped(_SCRIPT_INDENT + "| " + source),
        wrapped(printable(finding.cause), _SCRIPT_INDENT, _SCRIPT_INDENT),
        wrapped(printable(finding.fix.action), _SCRIPT_INDENT + "> ", _SCRIPT_INDENT + "  "),
    ]


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
        made(_field("why", check.cause) if check.cause else "", 41 + number),
        made(_field("cause", check.kind), 60 + number),
        *(made(_evidence(each), 70 + number) for each in check.evidence),
    ]


def _unknown_blocks(check: Check, number: int, few: bool) -> list[ScreenBlock]:
    needed = _field("needed", check.cause) if few and check.cause else ""
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
    if check.cause:
        lines.append(_field("why" if check.verdict == "bad" else "needed", check.cause))
    if check.verdict == "bad":
        lines.append(_field("cause", check.kind))
        lines.extend(map(_evidence, check.evidence))
    # Trying the fix may show what a check cannot tell.
    lines.extend(_fixes(check.fixes, "fix" if check.verdict == "bad" else "to try"))
    return "\n".join(lines)


def _evidence(found: Evidence) -> str:
    return _field("evidence", f"{found.what}: {found.value} ({found.source})")


def _first_lines(check: Check) -> str:
    first = f"{MARKS[check.verdict]:<6}{printable(check.name).ljust(_NAME)}"
    return wrapped(printable(check.title), first, " " * len(first))


def _good_texts(checks: Sequence[Check]) -> Iterator[str]:
    """A line a check; GPUs of which the same is said share one."""
    alike: dict[tuple[str, str], list[tuple[str, Check]]] = {}
    for check in checks:
        found = _GPU.match(check.title)
        index, said = (found[1], check.title[found.end() :]) if found else ("", check.title)
        alike.setdefault((check.name, said), []).append((index, check))
    for (_, said), group in alike.items():
        check = group[0][1]
        if len(group) > 1:
            indices = ", ".join(index for index, _ in group)
            check = dataclasses.replace(check, title=f"GPUs {indices}: {said}")
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
        lines.append(_label(label) + printable(fix.action))
        lines.append(_label("undo") + printable(fix.undo))
        lines.append(_field("cost", fix.cost))
    return lines


def _field(label: str, text: str) -> str:
    first = _label(label)
    return wrapped(printable(text), first, " " * len(first))


def _label(label: str) -> str:
    return _INDENT + label.ljust(_NAME)


# ---
# The processor as ``trainfit doctor --cpu`` shows it: clocks by group of cores, C-states.


#: The checks whose verdicts stand below the tables.
CHECKS: Final = ("cores", "threads", "frequency", "idle")
_UNKNOWN: Final = "cannot tell"
#: C-states that are shown: Intel's tables have up to nine.
_STATES: Final = 8


def cpu_screen(result: DoctorResult) -> list[Line]:
    """25 lines at most: what the processor is, its clocks, its C-states, the verdicts."""
    cpu = result.machine.cpu
    checks = [check for check in result.checks if check.name in CHECKS]
    clocks, idle = _clocks(cpu), _idle(cpu, _STATES)
    return screen(
        [
            *(block(printable(line), 20 if at else 0) for at, line in enumerate(_heading(cpu))),
            blank(80),
            *(made(row, 10 + at) for at, row in enumerate(clocks)),
            blank(81),
            *(made(row, 40 + at) for at, row in enumerate(idle)),
            blank(82),
            *(
                ScreenBlock(tuple(lines_of(_verdict(c), "bad" if c.verdict == "bad" else "plain")))
                for c in checks
            ),
            block(_more(), 30, style="quiet"),
        ],
        "all C-states",
    )


def cpu_text(result: DoctorResult) -> str:
    """The same with every C-state."""
    cpu = result.machine.cpu
    verdicts = [_verdict(check) for check in result.checks if check.name in CHECKS]
    heading = [wrapped(printable(line), "", "  ") for line in _heading(cpu)]
    tables = [[line for row in rows for line in row] for rows in (_clocks(cpu), _idle(cpu))]
    parts = [heading, *tables, [*verdicts, _more()]]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _heading(cpu: Cpu) -> list[str]:
    words = [_known(cpu.model)]
    if cpu.physical_cores.value:
        words.append(f"{cpu.physical_cores.value} cores")
    if cpu.logical_cpus.value:
        words.append(f"{cpu.logical_cpus.value} CPUs")
    drivers = sorted({each.driver for each in cpu.policies.value or () if each.driver})
    if drivers:
        mode = f" ({cpu.scaling_mode.value})" if cpu.scaling_mode.value else ""
        words.append(f"driver {'/'.join(drivers)}{mode}")
    if cpu.turbo.value is not None:
        words.append(f"turbo {'on' if cpu.turbo.value else 'off'}")
    lines, more = [", ".join(words)], []
    affinity = cpu.affinity.value
    if affinity and len(affinity) < (cpu.logical_cpus.value or 0):
        more.append(f"this process may run on CPUs {cpu_list_text(affinity)} only")
    governors = {name for each in cpu.policies.value or () for name in each.available_governors}
    if governors:
        more.append(f"available governors: {', '.join(sorted(governors))}")
    if more:
        text = "; ".join(more)
        lines.append(text[0].upper() + text[1:])
    return lines


def _known(fact: Fact[str]) -> str:
    return fact.value if fact.value is not None else f"{_UNKNOWN} ({fact.reason})"


# --- Clocks -------------------------------------------------------------------------------------
def _clocks(cpu: Cpu) -> list[list[str]]:
    """The lines of each row of a table, and what is not known."""
    groups = core_groups(cpu)
    if not groups:
        return [_lines(f"Clocks: {_UNKNOWN} ({cpu.logical_cpus.reason})")]
    head = ("CPUs", "kind", "governor", "EPP", "MHz now", "MHz allowed", "MHz max")
    rows = table_rows([_row(group) for group in groups], "wlllrrr", head, indent="")
    if cpu.policies.value is None:
        rows.append(_lines(f"{_UNKNOWN}: {cpu.policies.reason}"))
    elif all(group.now_hz is None for group in groups):
        rows.append(_lines(f"MHz now: {_UNKNOWN}: {cpu.current_hz.reason}"))
    return rows


def _lines(text: str) -> list[str]:
    return wrapped(printable(text), "", "  ").split("\n")


def _row(group: CoreGroup) -> tuple[str, ...]:
    preference = group.energy_preference
    if preference is None:
        preference = _UNKNOWN if group.governor is None else "none"
    return (
        _list(group.cpus),
        printable(group.kind or _UNKNOWN),
        printable(group.governor or _UNKNOWN),
        printable(preference),
        *map(_mhz, (group.now_hz, group.limit_hz, group.hardware_hz)),
    )


def _list(cpus: Sequence[int]) -> str:
    text = cpu_list_text(cpus)
    return text if len(text) <= 18 else f"{len(cpus)} CPUs from {min(cpus)}"


def _mhz(span: Span | None) -> str:
    if span is None:
        return _UNKNOWN
    low, high = (f"{hertz / 1e6:.0f}" for hertz in span)
    return low if low == high else f"{low}-{high}"


# --- C-states -----------------------------------------------------------------------------------
def _idle(cpu: Cpu, most: int | None = None) -> list[list[str]]:
    """Likewise; ``most`` states where there are more."""
    states = cpu.idle_states
    if not states.value:
        return [_lines(f"C-states: {_UNKNOWN} ({states.reason or 'none is listed'})")]
    shown = states.value
    if most is not None and len(shown) > most:
        shown = shown[: most - 1]
    head = ("C-state of CPU 0", "exit latency", "target residency", "")
    rows = table_rows([_state(each) for each in shown], "lrrl", head, indent="")
    if left := states.value[len(shown) :]:
        longest = max(state.latency_s for state in left)
        rows.append(_lines(f"{len(left)} more, exit latency up to {_us(longest)}"))
    return rows


def _state(state: IdleState) -> tuple[str, ...]:
    stay = _UNKNOWN if state.residency_s is None else _us(state.residency_s)
    return (
        printable(state.name),
        _us(state.latency_s),
        stay,
        "switched off" if state.disabled else "",
    )


def _us(seconds: float) -> str:
    return duration(seconds)


# --- Verdicts -----------------------------------------------------------------------------------
def _verdict(check: Check) -> str:
    first = f"{MARKS[check.verdict]:<6}{check.name:<11}"
    return wrapped(printable(check.title), first, " " * len(first))


def _more() -> str:
    return f"trainfit doctor --only {','.join(CHECKS)} has evidence and fixes"


# ---
# What the static reading of scripts found as SARIF 2.1.0, for code scanning and editors.


_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif_text(report: ScriptReport) -> str:
    """One SARIF document: a result for each finding, a notification for each file not read.

    Files below the working directory are named from there, which is the root of a repository where
    it is scanned.
    """
    rules = sorted({each.kind for each in report.findings})
    invocation: dict[str, Any] = {"executionSuccessful": True}
    if report.unread:
        invocation["toolExecutionNotifications"] = [
            {"level": "warning", "message": {"text": f"not read: {each}"}} for each in report.unread
        ]
    run = {
        "tool": {
            "driver": {
                "name": "trainfit",
                "semanticVersion": __version__,
                "rules": [_rule(each) for each in rules],
            }
        },
        "columnKind": "unicodeCodePoints",
        "invocations": [invocation],
        "results": [_result(each, rules.index(each.kind)) for each in report.findings],
    }
    document = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(document, indent=2, ensure_ascii=False)


def _rule(name: str) -> dict[str, Any]:
    text = f"{name.replace('-', ' ')}: costs memory or speed, or breaks portability"
    return {"id": name, "shortDescription": {"text": text}}


def _result(finding: Finding, rule: int) -> dict[str, Any]:
    region = {
        "startLine": finding.at.line,
        "startColumn": finding.at.column,
        "snippet": {"text": finding.at.source},
    }
    return {
        "ruleId": finding.kind,
        "ruleIndex": rule,
        "level": "warning",
        "message": {"text": f"{finding.cause} Write: {finding.fix.action}"},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": _uri(finding.at.file)},
                    "region": region,
                }
            }
        ],
    }


def _uri(file: str) -> str:
    path = Path(os.path.abspath(file))
    here = Path.cwd()
    return quote(path.relative_to(here).as_posix()) if path.is_relative_to(here) else path.as_uri()
