"""A diagnosis: checks with their fixes, habits of a script, the processor's clocks and C-states."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from trainfit.doctor.cores import CoreGroup, Span, core_groups
from trainfit.hardware.machine.parsing import cpu_list_text
from trainfit.report.blocks import (
    WHOLE,
    Block,
    Command,
    Facts,
    Headline,
    Item,
    Items,
    Row,
    Section,
    Subject,
    Table,
    Text,
    Tile,
    Tone,
    items,
    section,
    table,
)
from trainfit.report.live_figures import gpus_now_sections
from trainfit.results.doctor import Check, DoctorResult, ScriptReport, Verdict
from trainfit.results.findings import Finding
from trainfit.results.machine import Cpu, Fact, IdleState
from trainfit.results.text import count, duration, short

#: What a count of the checks of a verdict is called, the worst first.
_WORDS: Final[dict[Verdict, str]] = {"bad": "bad", "cannot_tell": "unknown", "good": "good"}
#: The last place at which something is on a screen where there is room.
_LAST: Final = WHOLE - 1
#: Characters of a line of the script.
_SOURCE: Final = 120
#: Lines of a check's reason on a screen.
_LINES: Final = 4


def doctor_subject(result: DoctorResult) -> Subject:
    """What is bad and how to fix it, what a script has, what is unknown, what is good."""
    script = script_sections(result.script) if result.script is not None else []
    bad, *others = _check_sections(result.checks)
    gpus = gpus_now_sections(result.machine.gpus.value or ())
    return Subject(_headline(result), (*bad, *script, *(s for part in others for s in part), *gpus))


def checks_subject(checks: Sequence[Check]) -> Subject:
    """The same of some checks alone."""
    parts = _check_sections(checks)
    return Subject(_counted(checks, ""), tuple(each for part in parts for each in part))


def _headline(result: DoctorResult) -> Headline:
    head = _counted(result.checks, f" ({duration(result.seconds)})")
    if result.script is None or not result.script.findings:
        return head
    tile = Tile("In the script", str(len(result.script.findings)), "findings", tone="warn")
    tone = head.tone if head.tone == "bad" else "warn"
    return dataclasses.replace(head, tone=tone, tiles=(*head.tiles, tile))


def _counted(checks: Sequence[Check], after: str) -> Headline:
    by_verdict = {verdict: [c for c in checks if c.verdict == verdict] for verdict in _WORDS}
    bad = by_verdict["bad"]
    counts = ", ".join(f"{len(by_verdict[verdict])} {word}" for verdict, word in _WORDS.items())
    return Headline(
        kind="Machine check",
        tone="bad" if bad else "good",
        text=counts + after,
        tiles=tuple(
            Tile(
                word.capitalize(),
                str(len(by_verdict[verdict])),
                _title(bad[0]) if bad and verdict == "bad" else "checks",
                tone="bad" if bad and verdict == "bad" else "plain",
            )
            for verdict, word in _WORDS.items()
        ),
    )


# -- checks ------------------------------------------------------------------------------------


def _check_sections(checks: Sequence[Check]) -> list[list[Section]]:
    """Bad ones, of which the fixes go before the reasons; unknown ones; good ones."""
    bad, unknown, good = ([c for c in checks if c.verdict == verdict] for verdict in _WORDS)
    return [
        # One block each: a screen has all titles, then the first fix of each, then the others.
        section("Bad checks", *(_bad(check, number) for number, check in enumerate(bad))),
        section("Unknown checks", *(_unknown(check, at) for at, check in enumerate(unknown))),
        section("Good checks", _good(good)),
    ]


def _title(check: Check) -> str:
    return f"{check.subject}: {check.title}" if check.subject else check.title


def _bad(check: Check, number: int) -> Items:
    evidence = _evidence(check, min(70 + number, _LAST))
    item = Item(
        _title(check),
        "bad",
        check.name,
        (
            Row("why", check.cause, min(41 + number, _LAST)),
            Row("cause", check.kind, min(60 + number, _LAST)),
            *evidence,
        ),
        tuple(
            Command(fix.action, "Fix", min(10 + number + 40 * at, _LAST), fix.undo, fix.cost)
            for at, fix in enumerate(check.fixes)
        ),
        min(number, 9),
        _LINES,
    )
    return Items((item,), "bad check")


def _unknown(check: Check, number: int) -> Items:
    """What is needed to tell; trying a fix may show it, too."""
    item = Item(
        _title(check),
        "warn",
        check.name,
        (Row("needed", check.cause, min(80 + number, _LAST)), *_evidence(check, WHOLE)),
        tuple(
            Command(fix.action, "To try", min(85 + number, _LAST), fix.undo, fix.cost)
            for fix in check.fixes
        ),
        min(22 + number, _LAST),
        _LINES,
    )
    return Items((item,), "unknown check")


def _evidence(check: Check, detail: int) -> list[Row]:
    return [
        Row("evidence", f"{each.what}: {each.value} ({each.source})", detail)
        for each in check.evidence
    ]


def _good(checks: Sequence[Check]) -> Facts | None:
    """A line a check; GPUs of which the same is said share one. Whether there is a GPU, the
    question that most people have, stays the longest."""
    alike: dict[tuple[str, str], list[str]] = {}
    for check in checks:
        alike.setdefault((check.name, check.title), []).append(check.subject)
    rows = [
        Row(name, f"{_together(gpus)}{title}", 21 if name == "gpu" else min(30 + at, _LAST))
        for at, ((name, title), gpus) in enumerate(alike.items())
    ]
    return Facts(tuple(rows), noun="good check") if rows else None


def _together(subjects: Sequence[str]) -> str:
    """ "GPU 0, GPU 1: " of what the same is said of; empty for the machine."""
    return f"{', '.join(subjects)}: " if any(subjects) else ""


# -- scripts -----------------------------------------------------------------------------------


def script_subject(report: ScriptReport) -> Subject:
    """Habits of scripts that cost memory, speed or portability, without a machine."""
    head = Headline(
        "Script check",
        "warn" if report.findings else "plain",
        f"Script {report.script}: {_counts(report)}",
    )
    return Subject(head, tuple(section("Habits in the script", *_habits(report))))


def script_sections(report: ScriptReport) -> list[Section]:
    """The same next to a machine."""
    counts = Text(_counts(report), "warn" if report.findings else "plain", 1)
    return section(f"Script {report.script}", counts, *_habits(report))


def _counts(report: ScriptReport) -> str:
    read = count(len(report.files), "file")
    if not report.findings:
        return f"nothing found; {read} read"
    files = {each.at.file for each in report.findings}
    where = f" in {count(len(files), 'file')}" if len(files) > 1 else ""
    return f"{count(len(report.findings), 'finding')}{where}; {read} read"


def _habits(report: ScriptReport) -> list[Block | None]:
    """By file, in the order in which they were read, and line: what stands there, what to write."""
    order = {name: number for number, name in enumerate(report.files)}
    found = sorted(
        report.findings,
        key=lambda f: (order.get(f.at.file, len(order)), f.at.file, f.at.line, f.at.column),
    )
    unread = [Item(each, "warn", "not read", detail=20) for each in report.unread]
    return [items([_habit(each) for each in found], "finding"), items(unread, "file not read")]


def _habit(finding: Finding) -> Item:
    place = f"{finding.at}:{finding.at.column}"
    rows = (
        Row("now", short(finding.at.source, _SOURCE), 2),
        Row("write", finding.fix.action, 2),
        Row("why", finding.cause, 50),
    )
    return Item(place, "warn", finding.kind, rows, detail=2)


# -- the processor -----------------------------------------------------------------------------


#: The checks of the processor.
CPU_CHECKS: Final = ("cores", "threads", "frequency", "idle")
_UNKNOWN: Final = "cannot tell"
#: Longest text of the CPUs of a group.
_LIST: Final = 18


def cpu_subject(result: DoctorResult) -> Subject:
    """The processor as ``trainfit doctor --cpu`` shows it: what it is, clocks by group of cores,
    C-states, and what its checks say."""
    cpu = result.machine.cpu
    checks = [check for check in result.checks if check.name in CPU_CHECKS]
    tone: Tone = "bad" if any(check.verdict == "bad" for check in checks) else "plain"
    parts = _check_sections(checks)
    return Subject(
        Headline("Processor", tone, _processor(cpu), limit=_allowed(cpu)),
        (
            *section("Clocks", *_clocks(cpu)),
            *section("C-states", *_idle(cpu)),
            *(each for part in parts for each in part),
        ),
    )


def _processor(cpu: Cpu) -> str:
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
    return ", ".join(words)


def _allowed(cpu: Cpu) -> str:
    """On which CPUs this process may run, and which governors there are."""
    parts = []
    affinity = cpu.affinity.value
    if affinity and len(affinity) < (cpu.logical_cpus.value or 0):
        parts.append(f"this process may run on CPUs {cpu_list_text(affinity)} only")
    governors = {name for each in cpu.policies.value or () for name in each.available_governors}
    if governors:
        parts.append(f"available governors: {', '.join(sorted(governors))}")
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}"


def _known(fact: Fact[str]) -> str:
    return fact.value if fact.value is not None else f"{_UNKNOWN} ({fact.reason})"


def _clocks(cpu: Cpu) -> list[Block | None]:
    """A table with a row for each group of cores, and why some of it is not known."""
    groups = core_groups(cpu)
    if not groups:
        return [Text(f"{_UNKNOWN} ({cpu.logical_cpus.reason})", detail=1)]
    unknown = ""
    if cpu.policies.value is None:
        unknown = f"{_UNKNOWN}: {cpu.policies.reason}"
    elif all(group.now_hz is None for group in groups):
        unknown = f"MHz now: {_UNKNOWN}: {cpu.current_hz.reason}"
    head = ("CPUs", "Kind", "Governor", "EPP", "MHz now", "limit", "max")
    clocks = table(head, [_row(group) for group in groups], numeric=(4, 5, 6), detail=10)
    return [clocks, Text(unknown, detail=11) if unknown else None]


def _row(group: CoreGroup) -> tuple[str, ...]:
    preference = group.energy_preference
    if preference is None:
        preference = _UNKNOWN if group.governor is None else "none"
    cpus = cpu_list_text(group.cpus)
    return (
        cpus if len(cpus) <= _LIST else f"{len(group.cpus)} CPUs from {min(group.cpus)}",
        group.kind or _UNKNOWN,
        group.governor or _UNKNOWN,
        preference,
        *map(_mhz, (group.now_hz, group.limit_hz, group.hardware_hz)),
    )


def _mhz(span: Span | None) -> str:
    if span is None:
        return _UNKNOWN
    low, high = (f"{hertz / 1e6:.0f}" for hertz in span)
    return low if low == high else f"{low}-{high}"


def _idle(cpu: Cpu) -> list[Table | Text | None]:
    states = cpu.idle_states
    if not states.value:
        return [Text(f"{_UNKNOWN} ({states.reason or 'none is listed'})", detail=12)]
    head = ("C-state of CPU 0", "Exit latency", "Target residency", "")
    rows = [_state(each) for each in states.value]
    return [table(head, rows, numeric=(1, 2), noun="C-state", detail=40)]


def _state(state: IdleState) -> tuple[str, ...]:
    stay = _UNKNOWN if state.residency_s is None else duration(state.residency_s)
    return state.name, duration(state.latency_s), stay, "switched off" if state.disabled else ""
