"""Allocated memory over one step, as a line of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from trainfit.results.format import size

_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 72


def timeline_section(timeline: Sequence[int], phases: Sequence[str] = ()) -> str:
    """One line of blocks, the highest of each part; below it the phases, if they are known."""
    if not timeline:
        return ""
    columns = min(_COLUMNS, len(timeline))
    edges = [round(i * len(timeline) / columns) for i in range(columns + 1)]
    parts = [(a, b) for a, b in itertools.pairwise(edges) if b > a]
    heights = [max(timeline[a:b]) for a, b in parts]
    low, high = min(heights), max(heights)
    span = max(high - low, 1)
    bars = "".join(_BARS[(h - low) * (len(_BARS) - 1) // span] for h in heights)
    lines = [f"Allocated over the last step ({size(low)} to {size(high)})", f"  {bars}"]
    if len(phases) == len(timeline):
        lines.append("  " + _phase_line([phases[(a + b) // 2] for a, b in parts]))
    return "\n".join(lines)


def _phase_line(phases: Sequence[str]) -> str:
    """Each phase's name under its part of the line, cut to what fits."""
    text = ""
    for phase, group in itertools.groupby(phases):
        width = len(list(group))
        text += ("|" + phase)[:width].ljust(width)
    return text.rstrip()
