"""The memory of a recording: on one screen, and as the whole text or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from trainfit.report.layout import (
    Line,
    ScreenBlock,
    blank,
    block,
    fact,
    made,
    note_block,
    screen,
    table,
)
from trainfit.report.memory_parts import (
    KIND_TITLES,
    batches_section,
    breakdown_section,
    context_basis,
    kinds_text,
    memory_rows,
    memory_section,
    missing,
    modules_text,
)
from trainfit.report.notes import (
    note_text,
    notes_section,
    profile_note,
    protection_notes,
    short_place,
)
from trainfit.report.steps import (
    coverage_text,
    pattern_notes,
    step_lines,
    steps_section,
    timeline_section,
)
from trainfit.results.files.contents import Note, complete
from trainfit.results.memory import (
    Allocation,
    BatchLaw,
    MemoryFigures,
    MemoryReport,
    Moment,
    OptimizerTable,
    OptimizerUse,
    RecordingSummary,
    SettingOutcome,
)
from trainfit.results.text import MIB, count, percent, printable, share, size, times, wrapped

# ---
# The result of ``trainfit memory`` as text.


#: Groups of alike allocations that are listed.
_GROUPS = 8


def explain_text(report: MemoryReport) -> str:
    """The whole report: peak, what stays, steps, fragmentation, batch size."""
    peak = report.peak
    parts = [
        "\n".join([_title(report), *(wrapped(x, "", "  ") for x in step_lines(report.step))]),
        memory_section(
            "Memory at the peak" + ("" if report.fits else ": DOES NOT FIT"), report.memory
        ),
        wrapped(moment_text(peak.moment), "The peak is in ", "  "),
        breakdown_section(peak.by_kind_bytes, peak.by_module_bytes, peak.allocated_bytes),
        _largest(report),
        timeline_section(report.timeline_bytes, report.timeline_phases),
        _between(report),
        _optimizers(report),
        steps_section(report.pattern),
        _fragmentation(report),
        batches_section(report),
        notes_section(complete((), report.notes, report.assumptions)),
    ]
    return "\n\n".join(part for part in parts if part)


def _title(report: MemoryReport) -> str:
    batch = "unknown" if report.batch_size is None else str(report.batch_size)
    text = (
        f"{printable(report.file)}: {printable(report.gpu)}, {size(report.gpu_memory_bytes)} "
        f"(batch size {batch}, {count(report.pattern.steps, 'optimizer step')}, "
        f"torch {printable(report.torch)})"
    )
    return wrapped(text, "", "  ")


def moment_text(moment: Moment) -> str:
    """When and where the peak is."""
    module = printable(moment.module)
    if moment.phase == "optimizer":
        where = "in the optimizer's step"
    elif moment.phase == "setup":
        where = "before the first forward pass"
    else:
        where = f"in the {moment.phase} of {module}" if module else f"in the {moment.phase}"
        where += "" if module else ", outside of modules"
    text = (
        f"step {moment.step}, {where}, {percent(moment.through_step)} through the step, "
        f"at {printable(moment.operator)}"
    )
    if moment.line is not None:
        text += f" ({printable(moment.line)})"
    return text


def _largest(report: MemoryReport) -> str:
    """The largest single allocations; those that differ in the module alone are one row."""
    groups: dict[Allocation, list[str]] = {}
    for each in report.peak.largest:
        alike = Allocation(**{**vars(each), "module": ""})
        groups.setdefault(alike, []).append(each.module)
    rows = []
    for each, modules in list(groups.items())[:_GROUPS]:
        times = f"{len(modules)} x " if len(modules) > 1 else ""
        others = len(set(modules)) - 1
        of = f" of {printable(modules[0])}" if modules[0] else ""
        of += f" and {count(others, 'other module')}" if others else ""
        line = f", {printable(each.line)}" if each.line is not None else ""
        text = (
            f"{each.kind.replace('_', ' ')}{of}: {printable(each.operator)} "
            f"in {each.phase}, step {each.step}{line}"
        )
        rows.append((times + size(each.nbytes), text))
    return "\n".join(["Largest single allocations at the peak", *table(rows, "rw")])


def _between(report: MemoryReport) -> str:
    stays = report.remaining
    if stays is None:
        return ""
    after, kept = stays.after_step_bytes, stays.kept_bytes
    step, total = report.pattern.steps, size(sum(after.values()))
    rows = []
    for kind, nbytes in sorted(after.items(), key=lambda item: -item[1]):
        if not nbytes:
            continue
        note = ""
        if kept is not None and kept[kind] == 0:
            note = "allocated in each step"
        elif kept is not None and kept[kind] < nbytes:
            note = f"{size(nbytes - kept[kind])} of it allocated in each step"
        rows.append((KIND_TITLES.get(kind, kind), size(nbytes), note))
    basis = f"{context_basis(report.memory)}, outside the allocator"
    rows.append(("CUDA context", size(stays.context_bytes), basis))
    title = f"Between steps, {total} allocated (after optimizer step {step})"
    return "\n".join([title, *table(rows, "lrw")])


def _optimizers(report: MemoryReport) -> str:
    found = report.optimizers
    if found is None or not found.trained_bytes:
        return ""
    trained = found.trained_bytes
    title = wrapped(
        f"Parameters by optimizer: each simulated on the {size(trained)} of parameters that "
        "this script trains (between steps: with gradients and state; peak: of its step)",
        "",
        "  ",
    )
    head = ("", "between steps", "", "peak", "")
    present = (
        f"this script, {printable(found.present) or 'its optimizer'}",
        times(found.present_bytes / trained),
        size(found.present_bytes),
        "",
        "",
    )
    known = [row for row in found.rows if row.between_steps_bytes is not None]
    rows = [*(_optimizer_row(row, trained) for row in known), present]
    lines = [title, *table(rows, "wrrrr", head)]
    unknown = [
        (row.name, f"cannot tell: {printable(row.reason)}")
        for row in found.rows
        if row.between_steps_bytes is None
    ]
    lines += table(unknown, "lw")
    if found.frozen_bytes:
        lines.append(f"  {size(found.frozen_bytes)} of frozen parameters come on top of each")
    return "\n".join(lines)


def _optimizer_row(row: OptimizerUse, trained: int) -> tuple[str, ...]:
    between, peak = row.between_steps_bytes or 0, row.peak_bytes
    return (
        row.name,
        times(between / trained),
        size(between),
        times(peak / trained) if peak is not None else "-",
        size(peak),
    )


def _fragmentation(report: MemoryReport) -> str:
    state, settings = report.fragmentation, report.settings
    ratio = state.reserved_bytes / max(state.allocated_bytes, 1)
    of = share(state.inactive_split_bytes, state.reserved_bytes)
    lines = [
        "Fragmentation at the peak",
        _figure(
            "reserved / allocated",
            f"{ratio:.3f}   {size(state.reserved_bytes)} / {size(state.allocated_bytes)}; most "
            f"reserved in the run: {size(state.peak_reserved_bytes)}",
        ),
        _figure(
            "free within segments",
            f"{size(state.inactive_split_bytes)} ({of} of reserved) in "
            f"{count(state.segments, 'segment')}; largest free block "
            f"{size(state.largest_free_block_bytes)}",
        ),
        *table(
            [_setting_row(each, settings[0]) for each in settings],
            "wrrw",
            ("allocator setting, simulated", "reserved", "change", "at this GPU"),
        ),
    ]
    best = report.best_setting
    if best is None:
        lines.append("  no setting saves a noticeable amount")
    else:
        lines.append(wrapped(f"set {printable(best.environment)}", "  ", "    "))
    return "\n".join(lines)


def _figure(label: str, text: str) -> str:
    return wrapped(text, f"  {label}  ", " " * (len(label) + 4))


def _setting_row(each: SettingOutcome, present: SettingOutcome) -> tuple[str, ...]:
    name = each.setting or (f"as it is ({each.environment})" if each.environment else "as it is")
    delta = each.reserved_bytes - present.reserved_bytes
    verdict = "fits" if each.fits else "does not fit"
    if each.retries:
        verdict += f", releases its cache {count(each.retries, 'time')}"
    if each.device_allocations_per_step:
        verdict += f", {each.device_allocations_per_step} cudaMalloc a step"
    change = _change(delta) if each.setting else ""
    return printable(name), size(each.reserved_bytes), change, verdict


def _change(delta: int) -> str:
    """A difference in bytes, with its sign."""
    return "0" if abs(delta) < MIB // 2 else size(delta, signed=True)


# ---
# The memory figures of a recording, as text and as JSON.


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


# ---
# The memory of a recording on one screen: does it fit, when is the peak, what is it of.


#: Single allocations, and kinds that stay between steps, that are named.
_ALLOCATIONS: Final = 3
_KINDS: Final = 3


def memory_screen(report: MemoryReport) -> list[Line]:
    """What ``trainfit memory`` found, in at most 25 lines."""
    return screen(
        _memory_blocks(report),
        "all kinds, modules, allocations, optimizers, allocator settings",
    )


def recording_screen(summary: RecordingSummary) -> list[Line]:
    """What ``trainfit simulate`` recorded, in at most 25 lines."""
    return screen(_recording_blocks(summary), "all kinds and modules, memory over the step, notes")


def _memory_blocks(report: MemoryReport) -> Iterator[ScreenBlock]:
    peak, batch = report.peak, report.batch_size
    at = f" at batch size {batch}" if batch is not None else ""
    law = report.batches
    largest = law.largest_batch if law is not None and law.law != "none" else None
    yield _answer(report.memory, report.gpu_memory_bytes, report.fits, at, largest)
    yield block(f"The peak is in {moment_text(peak.moment)}", rest="  ")
    yield blank()
    where = f"Memory on {printable(report.gpu)}{at} (90% prediction interval)"
    yield from _peak(report.memory, where, peak.by_kind_bytes, peak.by_module_bytes)
    yield from _largest_block(report)
    yield from _between_block(report)
    yield fact("optimizer", _optimizer_block(report.optimizers), 25)
    best = report.best_setting
    if best is not None:
        saved = size(report.settings[0].reserved_bytes - best.reserved_bytes)
        yield fact("allocator", f"{printable(best.environment)} reserves {saved} less", 10)
    for line in step_lines(report.step):
        yield fact("step", line, 15)
    for number, text in enumerate(pattern_notes(report.pattern)):
        yield note_block(printable(text), 6 + number)
    yield blank(85)
    yield from _law(report, law)
    for number, note in enumerate(complete((), report.notes, report.assumptions)):
        yield note_block(printable(note_text(note, short=True)), 35 + 10 * number)


def _answer(
    memory: MemoryFigures, total: int, fits: bool, at: str, largest: int | None = None
) -> ScreenBlock:
    need = f"{size(memory.device_bytes)} of {size(total)}{at}."
    text = f"Fits: {need}" if fits else f"Does not fit: needs {need}"
    if largest is not None:
        text += f" Largest batch {largest}." if largest else " Not even one sample fits."
    return block(text, style="good" if fits else "bad")


def _peak(
    memory: MemoryFigures, title: str, kinds: Mapping[str, int], modules: Mapping[str, int]
) -> Iterator[ScreenBlock]:
    total = memory.allocated_bytes
    yield ScreenBlock((*block(title, style="title").lines, *map(Line, memory_rows([memory]))))
    yield fact("at the peak", kinds_text(kinds, total), 5)
    yield fact("in modules", modules_text(modules, total), 8)


def _largest_block(report: MemoryReport) -> Iterator[ScreenBlock]:
    for number, each in enumerate(report.peak.largest[:_ALLOCATIONS]):
        of = f" of {printable(each.module)}" if each.module else ""
        line = f", {short_place(printable(each.line))}" if each.line is not None else ""
        text = (
            f"{size(each.nbytes)}: {each.kind.replace('_', ' ')}{of}, {printable(each.operator)} "
            f"in {each.phase}{line}"
        )
        yield fact("" if number else "largest", text, 22 + 8 * number)


def _between_block(report: MemoryReport) -> Iterator[ScreenBlock]:
    stays = report.remaining
    if stays is None:
        return
    after = sorted(stays.after_step_bytes.items(), key=lambda item: -item[1])
    named = [f"{KIND_TITLES.get(kind, kind)} {size(nbytes)}" for kind, nbytes in after if nbytes]
    text = f"{size(sum(stays.after_step_bytes.values()))} allocated: {', '.join(named[:_KINDS])}"
    context = f"CUDA context {size(stays.context_bytes)} ({context_basis(report.memory)})"
    yield fact("between steps", f"{text}; {context}", 12)


def _optimizer_block(found: OptimizerTable | None) -> str:
    """The script's, and the one that needs least, in multiples of the parameters."""
    if found is None or not found.trained_bytes:
        return ""
    present = f"{printable(found.present) or 'its optimizer'}: "
    present += f"{size(found.present_bytes)} with parameters and gradients"
    present += f" ({times(found.present_bytes / found.trained_bytes)} the parameters)"
    least = min(
        (row for row in found.rows if row.between_steps_bytes is not None),
        key=lambda row: row.between_steps_bytes or 0,
        default=None,
    )
    if least is None or (least.between_steps_bytes or 0) >= found.present_bytes:
        return present
    return f"{present}; least of those simulated: {least.name} {size(least.between_steps_bytes)}"


def _law(report: MemoryReport, law: BatchLaw | None) -> Iterator[ScreenBlock]:
    if law is None:
        words, *commands = missing(report)
        yield ScreenBlock(
            (
                *block(f"Other batch sizes: {words}").lines,
                *(Line(f"  {command}", "title") for command in commands),
            ),
            9,
        )
        return
    if law.law == "none":
        yield fact("batch size", f"no linear model: {printable(law.reason)}", 9)
        return
    text = (
        f"{size(law.device_base_bytes)} + batch x {size(round(law.device_per_sample_bytes))} of "
        f"device memory, from the recordings at {law.batches[0]} and {law.batches[1]}"
    )
    yield fact("batch size", text, 9)


def _recording_blocks(summary: RecordingSummary) -> Iterator[ScreenBlock]:
    full = summary.out_of_memory is not None
    yield _answer(summary.memory, summary.gpu_memory_bytes, not full, "")
    others = summary.other_processes_bytes
    held = f" ({size(others)} of it held by other processes)" if others else ""
    yield blank()
    title = f"Memory on {printable(summary.gpu)}{held} (90% prediction interval)"
    yield from _peak(summary.memory, title, summary.by_kind_bytes, summary.by_module_bytes)
    for line in step_lines(summary.step):
        yield fact("step", line, 15)
    yield fact("simulated", coverage_text(summary.coverage, summary.steps), 30)
    yield blank(85)
    yield from _notes(
        [
            *(Note("note", text) for text in pattern_notes(summary.pattern)),
            *recording_notes(summary),
        ]
    )
    yield made(f"Recording: {printable(summary.file)}")
    text = (
        f"{count(summary.steps, 'optimizer step')}, {count(summary.operators, 'operator')}, "
        f"torch {printable(summary.torch)}; trainfit memory explains it, trainfit report opens it"
    )
    yield block(text, 20, first="  ", rest="  ")


def _notes(notes: Iterable[Note]) -> Iterator[ScreenBlock]:
    """The first one stays."""
    for number, note in enumerate(notes):
        text = printable(note_text(note, short=True))
        rank = 3 if not number else 35 + 10 * number
        yield note_block(text, rank, "" if number else "Notes")
