"""The processor as ``trainfit doctor --cpu`` shows it: clocks by group of cores, C-states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trainfit.doctor.cpu.core_groups import CoreGroup, Span, core_groups
from trainfit.hardware.host.parsing import cpu_list_text
from trainfit.report.machine.doctor import MARKS
from trainfit.report.screen import Line, ScreenBlock, blank, block, lines_of, made, screen
from trainfit.report.table import table_rows
from trainfit.results.files.facts import Fact
from trainfit.results.format import duration
from trainfit.results.machine.doctor import Check, DoctorResult
from trainfit.results.machine.machine import Cpu, IdleState
from trainfit.results.text import printable, wrapped

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
    return wrapped(printable(check.summary), first, " " * len(first))


def _more() -> str:
    return f"trainfit doctor --only {','.join(CHECKS)} has evidence and fixes"
