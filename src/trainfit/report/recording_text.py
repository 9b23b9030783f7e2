"""The memory figures of a recording, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json

from trainfit.report.plan_text import breakdown_section, memory_section
from trainfit.report.sizes import printable, size
from trainfit.results.summary import RecordingSummary

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 72


def recording_json(summary: RecordingSummary) -> str:
    """One JSON document."""
    document = {"format": "trainfit-memory", "version": 1, **dataclasses.asdict(summary)}
    return json.dumps(document, indent=2)


def recording_text(summary: RecordingSummary) -> str:
    """Figures, what they consist of, and memory over the last step."""
    parts = [
        f"{printable(summary.gpu)}, {size(summary.gpu_memory_bytes)}: {summary.steps} optimizer "
        f"steps, {summary.operators} operators (torch {summary.torch})",
        memory_section("Memory at the peak", summary.memory),
        breakdown_section(summary.by_kind, summary.by_module, summary.memory.allocated_bytes),
        _course(summary.timeline),
        _notes(summary),
        f"Recording: {printable(summary.file)} (show it again with `trainfit show`)",
    ]
    return "\n\n".join(part for part in parts if part)


def _course(timeline: tuple[int, ...]) -> str:
    if not timeline:
        return ""
    columns = min(_WIDTH, len(timeline))
    edges = [round(i * len(timeline) / columns) for i in range(columns + 1)]
    heights = [max(timeline[a:b]) for a, b in zip(edges, edges[1:], strict=False) if b > a]
    low, high = min(heights), max(heights)
    span = max(high - low, 1)
    bars = "".join(_BARS[(h - low) * (len(_BARS) - 1) // span] for h in heights)
    return f"Allocated over the last step ({size(low)} to {size(high)})\n  {bars}"


def _notes(summary: RecordingSummary) -> str:
    lines = []
    if summary.out_of_memory:
        lines.append(f"  - does not fit: {printable(summary.out_of_memory.splitlines()[0])}")
    for text, count in summary.assumptions.items():
        times = f" ({count} times)" if count > 1 else ""
        lines.append(f"  - assumed: {printable(text)}{times}")
    return "\n".join(["Notes", *lines]) if lines else ""
