"""The memory figures of a recording, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json

from trainfit.report.memory_text import (
    breakdown_section,
    memory_section,
    notes_section,
    profile_note,
)
from trainfit.report.sizes import printable, size, wrapped
from trainfit.report.steps_text import steps_section
from trainfit.report.timeline_text import timeline_section
from trainfit.results.summary import RecordingSummary
from trainfit.results.words import count


def recording_json(summary: RecordingSummary) -> str:
    """One JSON document."""
    document = {"format": "trainfit-memory", "version": 1, **dataclasses.asdict(summary)}
    return json.dumps(document, indent=2, allow_nan=False)


def recording_text(summary: RecordingSummary) -> str:
    """Figures, what they consist of, and memory over the last step."""
    total = summary.memory.allocated_bytes
    full = summary.out_of_memory
    # The rest of PyTorch's message is advice.
    notes = [f"does not fit: {full.partition(' If reserved')[0]}"] if full else []
    notes += [*profile_note(summary.profile), *summary.notes]
    others = summary.other_processes_bytes
    held = f", of which other processes hold {size(others)}" if others else ""
    title = (
        f"{printable(summary.gpu)}, {size(summary.gpu_memory_bytes)}{held} "
        f"({count(summary.steps, 'optimizer step')}, {count(summary.operators, 'operator')}, "
        f"torch {printable(summary.torch)})"
    )
    parts = [
        wrapped(title, "", "  "),
        memory_section("Memory at the peak", summary.memory),
        breakdown_section(summary.by_kind_bytes, summary.by_module_bytes, total),
        timeline_section(summary.timeline_bytes),
        steps_section(summary.pattern) if summary.pattern is not None else "",
        notes_section(notes, summary.assumptions),
        f"Recording: {printable(summary.file)} (show it again with `trainfit show`)",
    ]
    return "\n\n".join(part for part in parts if part)
