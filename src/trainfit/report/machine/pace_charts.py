"""Paced calls over time and as a histogram, in characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trainfit.results.format import duration, percent
from trainfit.results.machine.pace import Block, PaceResult

_EIGHTHS: Final = "▁▂▃▄▅▆▇█"
#: Cells of a strip, rows of a histogram and cells of its longest bar.
_STRIP: Final = 64
_ROWS: Final = 8
_BAR: Final = 36


def strips(result: PaceResult) -> str:
    """The median of each stretch of time, all rates on one scale."""
    rows = [(name, values) for name, values in times(result) if len(values) >= _ROWS]
    if not rows:
        return ""
    least = min(min(values) for _, values in rows)
    most = max(_quantile(values, 0.99) for _, values in rows)
    head = f"Latency over time (lowest {duration(least)}, highest {duration(most)})"
    lines = [head]
    for name, values in rows:
        cells = min(_STRIP, len(values))
        strip = ""
        for cell in range(cells):
            part = values[cell * len(values) // cells : (cell + 1) * len(values) // cells]
            level = (_quantile(part, 0.5) - least) / (most - least) if most > least else 0.0
            strip += _EIGHTHS[max(0, min(7, int(8 * level)))]
        lines.append(f"  {name:<14}{strip}")
    return "\n".join(lines)


def times(result: PaceResult) -> list[tuple[str, list[float]]]:
    """Calls with work of the base measurement, in order of time, by rate."""
    rows: dict[str, list[float]] = {}
    for block in result.blocks:
        if block.phase == "baseline":
            name = "back to back" if block.hz is None else f"{block.hz:g} Hz"
            rows.setdefault(name, []).extend(_working(block, result))
    return list(rows.items())


def _working(block: Block, result: PaceResult) -> list[float]:
    return [
        wall
        for number, wall in enumerate(block.wall_s)
        if number >= block.settled and (block.first_call + number) % result.period == result.phase
    ]


def histogram(result: PaceResult) -> str:
    """Histogram of the slowest rate, compared with calls back to back."""
    if not result.rates:
        return ""
    worst = max(result.rates, key=lambda row: row.calls.p50)
    found = dict(times(result))
    shown = [name for name in (f"{worst.hz:g} Hz", "back to back") if found.get(name)]
    values = [value for name in shown for value in found[name]]
    if len(values) < 2 * _ROWS:
        return ""
    least, most = min(values), _quantile(values, 0.99)
    if most <= least:
        return ""
    width = (most - least) / _ROWS
    lines = ["Distribution (share of the calls)"]
    bins = {name: _bins(found[name], least, width) for name in shown}
    longest = max(max(each) for each in bins.values())
    for row in range(_ROWS):
        to = "and more" if row == _ROWS - 1 else f"to {duration(least + (row + 1) * width)}"
        for number, name in enumerate(shown):
            share = bins[name][row]
            bar = "█" * round(_BAR * share / longest)
            label = f"{duration(least + row * width)} {to}" if number == 0 else ""
            lines.append(f"  {label:<22}{name:<13}{bar}{' ' if bar else ''}{percent(share)}")
    return "\n".join(lines)


def _bins(values: Sequence[float], least: float, width: float) -> list[float]:
    counts = [0] * _ROWS
    for value in values:
        counts[min(_ROWS - 1, int((value - least) / width))] += 1
    return [number / len(values) for number in counts]


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
