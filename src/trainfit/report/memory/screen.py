"""The memory of a recording on one screen: does it fit, when is the peak, what is it of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from trainfit.report.memory.batches import missing
from trainfit.report.memory.explain import moment_text
from trainfit.report.memory.recording import recording_notes
from trainfit.report.memory.sections import KIND_TITLES, context_basis
from trainfit.report.memory.table import kinds_text, memory_rows, modules_text
from trainfit.report.notes_text import note_text, short_place
from trainfit.report.screen import Line, ScreenBlock, blank, block, fact, made, note_block, screen
from trainfit.report.steps.course import pattern_notes
from trainfit.report.steps.coverage import coverage_text
from trainfit.report.steps.step import step_lines
from trainfit.results.files.notes import Note, complete
from trainfit.results.format import count, size, times
from trainfit.results.memory.explanation import BatchLaw, MemoryReport, OptimizerTable
from trainfit.results.memory.figures import MemoryFigures
from trainfit.results.memory.summary import RecordingSummary
from trainfit.results.text import printable

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
    yield from _largest(report)
    yield from _between(report)
    yield fact("optimizer", _optimizers(report.optimizers), 25)
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


def _largest(report: MemoryReport) -> Iterator[ScreenBlock]:
    for number, each in enumerate(report.peak.largest[:_ALLOCATIONS]):
        of = f" of {printable(each.module)}" if each.module else ""
        line = f", {short_place(printable(each.line))}" if each.line is not None else ""
        text = (
            f"{size(each.nbytes)}: {each.kind.replace('_', ' ')}{of}, {printable(each.operator)} "
            f"in {each.phase}{line}"
        )
        yield fact("" if number else "largest", text, 22 + 8 * number)


def _between(report: MemoryReport) -> Iterator[ScreenBlock]:
    stays = report.remaining
    if stays is None:
        return
    after = sorted(stays.after_step_bytes.items(), key=lambda item: -item[1])
    named = [f"{KIND_TITLES.get(kind, kind)} {size(nbytes)}" for kind, nbytes in after if nbytes]
    text = f"{size(sum(stays.after_step_bytes.values()))} allocated: {', '.join(named[:_KINDS])}"
    context = f"CUDA context {size(stays.context_bytes)} ({context_basis(report.memory)})"
    yield fact("between steps", f"{text}; {context}", 12)


def _optimizers(found: OptimizerTable | None) -> str:
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
