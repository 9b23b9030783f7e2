"""The memory figures of a recording, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json

from trainfit.report.memory.sections import breakdown_section, memory_section
from trainfit.report.notes_text import notes_section, profile_note
from trainfit.report.protection_text import protection_notes
from trainfit.report.steps.course import steps_section
from trainfit.report.steps.coverage import coverage_text
from trainfit.report.steps.step import step_lines
from trainfit.report.steps.timeline import timeline_section
from trainfit.results.files.notes import Note, complete
from trainfit.results.format import count, size
from trainfit.results.memory.summary import RecordingSummary
from trainfit.results.text import printable, wrapped


def recording_json(summary: RecordingSummary) -> str:
    """One JSON document."""
    document = {"format": "trainfit-memory", "version": 1, **dataclasses.asdict(summary)}
    return json.dumps(document, indent=2, allow_nan=False)


def recording_text(summary: RecordingSummary) -> str:
    """Figures, what they consist of, and memory over the last step."""
    total = summary.memory.allocated_bytes
    others = summary.other_processes_bytes
    held = f", of which other processes hold {size(others)}" if others else ""
    title = (
        f"{printable(summary.gpu)}, {size(summary.gpu_memory_bytes)}{held} "
        f"({count(summary.steps, 'optimizer step')}, {count(summary.operators, 'operator')}, "
        f"torch {printable(summary.torch)})"
    )
    parts = [
        "\n".join(wrapped(line, "", "  ") for line in (title, *step_lines(summary.step))),
        memory_section("Memory at the peak", summary.memory),
        breakdown_section(summary.by_kind_bytes, summary.by_module_bytes, total),
        timeline_section(summary.timeline_bytes),
        _steps(summary),
        notes_section(recording_notes(summary)),
        f"Recording: {printable(summary.file)}\n"
        "  (show it with `trainfit show`, open it with `trainfit report`)",
    ]
    return "\n\n".join(part for part in parts if part)


def recording_notes(summary: RecordingSummary) -> list[Note]:
    """All notes, those that change the figures first."""
    full = summary.out_of_memory
    # The rest of PyTorch's message is advice.
    notes = [f"does not fit: {full.partition(' If reserved')[0]}"] if full else []
    notes += profile_note(summary.profile)
    return complete(
        [
            *(Note("note", text, severity="changes the figures") for text in notes),
            *summary.structured_notes,
        ],
        [*summary.notes, *protection_notes(summary.protection)],
        summary.assumptions,
    )


def _steps(summary: RecordingSummary) -> str:
    """How memory goes on from step to step, and what else was simulated."""
    text = coverage_text(summary.coverage, summary.steps)
    lines = [steps_section(summary.pattern)] if summary.pattern is not None else []
    if text:
        lines += [*([] if lines else ["Over the steps"]), wrapped(text, "  ", "    ")]
    return "\n".join(lines)
