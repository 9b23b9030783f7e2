"""A diagnosis: checks with their fixes, habits of a script, the processor's clocks and C-states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from trainfit.doctor.cores import CoreGroup, Span, core_groups
from trainfit.hardware.machine.parsing import cpu_list_text
from trainfit.report.blocks import (
    WHOLE,
    Block,
    Facts,
    Headline,
    Item,
    Items,
    Row,
    Section,
    Snippet,
    Subject,
    Table,
    Text,
    Tile,
    Tone,
    items,
    rows,
    section,
    table,
)
from trainfit.results.doctor import Check, DoctorResult, ScriptReport, Verdict
from trainfit.results.findings import Finding
from trainfit.results.gpus import MeaningLine
from trainfit.results.machine import Cpu, Fact, Gpu, IdleState
from trainfit.results.text import GIB, count, duration, percent, printable, short

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
    """The subject of some checks alone."""
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
        section("Unknown checks", *(_unknown(check, index) for index, check in enumerate(unknown))),
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
            Snippet(fix.action, "Fix", min(10 + number + 40 * index, _LAST), fix.undo, fix.cost)
            for index, fix in enumerate(check.fixes)
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
            Snippet(fix.action, "To try", min(85 + number, _LAST), fix.undo, fix.cost)
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
        Row(name, f"{_together(gpus)}{title}", 21 if name == "gpu" else min(30 + index, _LAST))
        for index, ((name, title), gpus) in enumerate(alike.items())
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
    """A script's sections next to a machine's."""
    counts = Text(_counts(report), "warn" if report.findings else "plain", 1)
    return section(f"Script {report.script}", counts, *_habits(report))


def _counts(report: ScriptReport) -> str:
    read = count(len(report.files), "file")
    if not report.findings:
        return f"nothing found; {read} read"
    files = {finding.at.file for finding in report.findings}
    where = f" in {count(len(files), 'file')}" if len(files) > 1 else ""
    return f"{count(len(report.findings), 'finding')}{where}; {read} read"


def _habits(report: ScriptReport) -> list[Block | None]:
    """Blocks that name, by file in the order in which they were read and by line, what stands there
    and what to write."""
    order = {name: number for number, name in enumerate(report.files)}
    findings = sorted(
        report.findings,
        key=lambda f: (order.get(f.at.file, len(order)), f.at.file, f.at.line, f.at.column),
    )
    unread = [Item(each, "warn", "not read", detail=20) for each in report.unread]
    return [
        items([_habit(finding) for finding in findings], "finding"),
        items(unread, "file not read"),
    ]


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
    """The CPUs on which this process may run, and the governors that there are."""
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


# ---
# What the live figures of a GPU say and do not say: space, time, clocks and power.


_T = TypeVar("_T")

# Shares from which on `situation` speaks of idle, busy, full and so on. They are our judgement:
# each only picks the words, and the figures stand next to them.
_IDLE = 0.05
_HALF = 0.5
_BUSY = 0.9
_FULL = 0.8
_HELD = 0.1
_LOW_POWER = 0.5
_MUCH_TRAFFIC = 0.6

#: NVML's reasons for the current clock (nvml.h, nvmlClocksEventReasons) in words.
_REASONS: Mapping[str, str] = {
    "gpu_idle": "idle",
    "applications_clocks_setting": "set by the user",
    "sw_power_cap": "power limit",
    "hw_slowdown": "slowed by hardware",
    "sync_boost": "sync boost group",
    "sw_thermal_slowdown": "too hot",
    "hw_thermal_slowdown": "too hot",
    "hw_power_brake_slowdown": "power brake",
    "display_clock_setting": "display",
}
_HELD_DOWN = frozenset(
    {"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
)
#: With any of these the clock is low for another reason than the kernels.
_LOWERED = _HELD_DOWN | {"applications_clocks_setting", "sync_boost", "display_clock_setting"}


def meaning(gpu: Gpu) -> tuple[MeaningLine, ...]:
    """Each live figure with what it says and what it does not; one without a value has the
    reason."""
    return (
        _line(
            "GPU-Util",
            gpu.utilisation,
            percent,
            "time: the share of the last 1/6 to 1 s in which a kernel ran",
            "how much of the GPU the kernels used: a single small one counts as 100%",
        ),
        _line(
            "memory used",
            gpu.used_bytes,
            lambda used: _of(used / GIB, gpu.memory_bytes, GIB, "GiB", digits=1),
            "space: memory of all processes, including PyTorch's cache of freed tensors",
            "what a job needs, or how busy the GPU is",
        ),
        _line(
            "memory traffic",
            gpu.memory_utilisation,
            percent,
            "time: the share in which memory was read or written (utilization.memory)",
            "how much memory is used, or how close the bandwidth is to its peak",
        ),
        _line(
            "SM clock",
            gpu.sm_hz,
            lambda hz: _of(hz / 1e6, gpu.sm_max_hz, 1e6, "MHz", share=False) + _why(gpu),
            "speed: arithmetic is slower in proportion to it; low is normal for an idle GPU",
            "whether anything runs",
        ),
        _line(
            "power",
            gpu.power_w,
            lambda watts: _of(watts, gpu.power_limit_w, 1.0, "W") + _lowered(gpu),
            "load: the best indicator of how busy the GPU is, as small kernels leave it low",
            "whether the work is useful or fast",
        ),
        _line(
            "temperature",
            gpu.temperature_c,
            lambda degrees: _degrees(degrees, gpu.slowdown_c),
            "above the second figure the GPU lowers its clock"
            if gpu.slowdown_c.is_known
            else "a hot GPU lowers its clock",
            "the temperature of its memory, which lowers the clock on some cards",
        ),
    )


def situation(gpu: Gpu) -> str:
    """Summary of the figures in a sentence or two."""
    busy = gpu.utilisation.value
    power = _share(gpu.power_w, gpu.power_limit_w)
    if busy is None:
        text = "Its utilization is not known"
        text += f": {printable(gpu.utilisation.reason)}." if gpu.utilisation.reason else "."
        if power is not None:
            text += f" It draws {percent(power)} of its power limit."
    elif busy < _IDLE:
        text = _idle_since(gpu)
    elif busy < _BUSY:
        text = _waiting(gpu, busy)
    else:
        text = _running(gpu, power)
    held_down = [reason for reason in gpu.clock_reasons.value or () if reason in _HELD_DOWN]
    if held_down:
        text += f" Its clock is lowered ({_words(held_down)}): check cooling and power supply."
    return text


def gpus_now_sections(gpus: tuple[Gpu, ...]) -> list[Section]:
    """An item a GPU; what a figure means stands next to it at the first GPU that has it."""
    explained: set[str] = set()
    longer = Text("For a longer time: nvidia-smi dmon -s pucm")
    found = items([_gpu(gpu, explained) for gpu in gpus])
    return section("GPUs at this moment", found, longer) if gpus else []


def _gpu(gpu: Gpu, explained: set[str]) -> Item:
    name = gpu.name.value if gpu.name.value is not None else "name not known"
    lines = meaning(gpu)
    missing = _missing([line for line in lines if line.value is None])
    figures = []
    for line in lines:
        if line.value is not None:
            says = f"; {line.says}; not {line.does_not_say}"
            figures.append((line.figure, line.value + (says * (line.figure not in explained))))
            explained.add(line.figure)
    return Item(
        f"GPU {gpu.index}, {name}: {situation(gpu)}", rows=rows(*figures, ("not known", missing))
    )


def _missing(lines: Iterable[MeaningLine]) -> str:
    """Figures without a value, those of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for line in lines:
        by_reason.setdefault(line.says, []).append(line.figure)
    return "; ".join(
        ", ".join(figures) + (f" ({reason})" if reason else "")
        for reason, figures in by_reason.items()
    )


def _line(
    figure: str, fact: Fact[_T], show: Callable[[_T], str], says: str, does_not: str
) -> MeaningLine:
    if fact.value is None:
        return MeaningLine(figure, None, printable(fact.reason), source=fact.source)
    return MeaningLine(figure, show(fact.value), says, does_not, source=fact.source)


def _idle_since(gpu: Gpu) -> str:
    held = _share(gpu.used_bytes, gpu.memory_bytes)
    # A display alone keeps a kernel running now and then.
    runs = "It is idle" if not gpu.utilisation.value else "It is almost idle"
    if held is None:
        return f"{runs}."
    if held < _HELD:
        return f"{runs}, and hardly any memory is used."
    return (
        f"{runs}, though {percent(held)} of its memory is used: its job waits for data or the "
        "CPU, has stopped, or keeps memory that it no longer needs."
    )


def _waiting(gpu: Gpu, busy: float) -> str:
    held = _share(gpu.used_bytes, gpu.memory_bytes)
    text = f"A kernel ran for {percent(busy)} of the time"
    text += ": if this lasts, it waits for data, the CPU or launches"
    if held is not None and held >= _FULL:
        return (
            f"{text}. Memory is full but the GPU is not busy: a larger batch hardly fits, a "
            "faster DataLoader or fewer waits help."
        )
    if busy < _HALF and held is not None and held < _HALF:
        return f"{text}; there is also memory for a larger batch."
    return f"{text}."


def _running(gpu: Gpu, power: float | None) -> str:
    traffic = gpu.memory_utilisation.value
    if traffic is not None and traffic >= _MUCH_TRAFFIC:
        return (
            f"A kernel nearly always runs, and memory is in use for {percent(traffic)} of the "
            "time: bandwidth is likely the limit. Fewer bytes help: 16-bit types, fused operations."
        )
    if power is None:
        return (
            "A kernel nearly always runs; how much of the GPU it uses is not known without power "
            "and power limit."
        )
    if power < _LOW_POWER:
        if _LOWERED & set(gpu.clock_reasons.value or ()):
            return (
                f"A kernel nearly always runs, at {percent(power)} of its power limit: its clock "
                "is lowered or kernels are small, which cannot be distinguished."
            )
        return (
            f"A kernel nearly always runs, yet it draws {percent(power)} of its power limit: "
            "likely small kernels one after another, which leave most of it idle. "
            f"{_fuller(gpu)} help."
        )
    return f"Busy: a kernel nearly always runs, at {percent(power)} of its power limit."


def _fuller(gpu: Gpu) -> str:
    """What makes kernels larger or launches cheaper; torch.compile's Triton needs 7.0."""
    capability = gpu.capability.value
    if capability is not None and capability < (7, 0):
        return "A larger batch or CUDA graphs"
    return "A larger batch, torch.compile or CUDA graphs"


def _why(gpu: Gpu) -> str:
    reasons = gpu.clock_reasons.value
    return f" ({_words(reasons)})" if reasons else ""


def _words(reasons: Sequence[str]) -> str:
    words = [_REASONS.get(reason, printable(reason.replace("_", " "))) for reason in reasons]
    return ", ".join(dict.fromkeys(words))


def _lowered(gpu: Gpu) -> str:
    limit, default = gpu.power_limit_w.value, gpu.power_limit_default_w.value
    if limit is None or default is None or round(limit) == round(default):
        return ""
    return f"; as sold {default:.0f} W"


def _degrees(value: float, slowdown: Fact[float]) -> str:
    return (
        f"{value:.0f} °C" if slowdown.value is None else f"{value:.0f} of {slowdown.value:.0f} °C"
    )


def _of(
    part: float,
    whole: Fact[int] | Fact[float],
    unit: float,
    name: str,
    *,
    digits: int = 0,
    share: bool = True,
) -> str:
    """ "5.2 of 23.6 GiB (22%)", or "5.2 GiB" where the whole is not known."""
    if whole.value is None or whole.value <= 0:
        return f"{part:.{digits}f} {name}"
    total = whole.value / unit
    text = f"{part:.{digits}f} of {total:.{digits}f} {name}"
    return f"{text} ({percent(part / total)})" if share else text


def _share(part: Fact[int] | Fact[float], whole: Fact[int] | Fact[float]) -> float | None:
    if part.value is None or whole.value is None or whole.value <= 0:
        return None
    return part.value / whole.value
