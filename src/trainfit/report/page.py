"""Puts a page together: of each result its headline and sections, in one order, and its notes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from trainfit.report.blocks import (
    Entry,
    Headline,
    Item,
    Items,
    Output,
    Page,
    Section,
    Subject,
    Table,
    Tone,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.report.notes import note_text, plain
from trainfit.report.sections.batch import noise_subject, trade_subject
from trainfit.report.sections.comparison import comparison_subject as runs_subject
from trainfit.report.sections.comparison import tried_subject
from trainfit.report.sections.doctor import doctor_subject
from trainfit.report.sections.gpus import catalogue_subject, comparison_subject
from trainfit.report.sections.loader import loader_subject
from trainfit.report.sections.memory import recording_subject
from trainfit.report.sections.pace import pace_subject
from trainfit.report.sections.plan import plan_subject
from trainfit.report.sections.real_runs import prediction_subject, profile_subject
from trainfit.report.sections.rehearsal import rehearsal_subject
from trainfit.report.sections.snapshot import snapshot_subject
from trainfit.report.sections.sweep import sweep_subject
from trainfit.report.sections.watch import watch_subject
from trainfit.results.batch import BatchExplanation, NoiseResult
from trainfit.results.doctor import DoctorResult
from trainfit.results.files.contents import Note, Severity
from trainfit.results.files.documents import ResultFile
from trainfit.results.gpus import GpusResult, Profile
from trainfit.results.loader import LoaderResult
from trainfit.results.memory import RecordingSummary, SnapshotReport
from trainfit.results.pace import PaceResult
from trainfit.results.plan import PlanResult
from trainfit.results.real_runs import Verification
from trainfit.results.rehearsal import Rehearsal
from trainfit.results.runs.sweep import SweepResult
from trainfit.results.speed import GpuComparison
from trainfit.results.text import cores, count, ghz, size
from trainfit.results.watch import AdviceVerification, Comparison, WatchResult
from trainfit.version import __version__

# ---
# Every assumption, warning and note of the results, with the file each is from.


_TONES: Final[dict[Severity, Tone]] = {
    "changes the figures": "bad",
    "may change the figures": "warn",
    "information": "plain",
}


def notes_section(subjects: Sequence[tuple[str, Subject]]) -> list[Section]:
    """Notes, those that change figures first; ``subjects`` with their files' names."""
    several = len(subjects) > 1
    found = [
        Item(
            note_text(note),
            _TONES[note.severity],
            f"{note.kind} · {name}" if several else note.kind,
        )
        for name, subject in subjects
        for note in subject.notes
    ]
    order = list(_TONES.values())
    found.sort(key=lambda item: order.index(item.tone))
    return section("Assumptions and warnings", Items(tuple(found)) if found else None)


def _notes(result: Any) -> Iterator[Note]:
    yield from plain(getattr(result, "notes", ()))


_Build = Callable[[Entry], Subject]


def page_of(entries: Sequence[Entry]) -> Page:
    """The page of these results: plans first, then what was measured, then machines."""
    order = list(_SUBJECTS)
    ranked = sorted(entries, key=lambda entry: _rank(entry, order))
    subjects = [subject_of(entry, ranked) for entry in ranked]
    sections: list[Section] = []
    for entry, subject in zip(ranked, subjects, strict=True):
        alike = sum(type(other.result) is type(entry.result) for other in ranked) > 1
        sections += [_named(each, entry.name if alike else "") for each in subject.sections]
    results = [(entry.name, entry.result) for entry in ranked]
    first = subjects[0].headline
    return Page(
        title=first.subject or first.kind,
        headlines=tuple(subject.headline for subject in subjects),
        sections=(
            *_side_by_side(ranked, subjects),
            *sections,
            *machine_sections(results),
            *notes_section(
                [(entry.name, subject) for entry, subject in zip(ranked, subjects, strict=True)]
            ),
        ),
        sources=tuple(
            (entry.name, subject.headline.kind)
            for entry, subject in zip(ranked, subjects, strict=True)
        ),
        version=__version__,
    )


def _side_by_side(entries: Sequence[Entry], subjects: Sequence[Subject]) -> list[Section]:
    """The figures of several results of a kind in one table, a column a result."""
    kinds: dict[str, list[tuple[str, Headline]]] = {}
    for entry, subject in zip(entries, subjects, strict=True):
        kinds.setdefault(subject.headline.kind, []).append((entry.name, subject.headline))
    tables = [_figures_of(kind, heads) for kind, heads in kinds.items() if len(heads) > 1]
    return section("Side by side", *tables)


def _figures_of(kind: str, heads: Sequence[tuple[str, Headline]]) -> Table | None:
    cells = [
        {
            "command": head.subject,
            "answer": head.text,
            **{
                tile.label: f"{tile.value} ({tile.detail})" if tile.detail else tile.value
                for tile in head.tiles
            },
        }
        for _, head in heads
    ]
    labels = dict.fromkeys(label for cell in cells for label in cell)
    return table_of(
        (kind, *(name for name, _ in heads)),
        [(label, *(cell.get(label, "-") or "-" for cell in cells)) for label in labels],
        f"{kind}: {len(heads)} results",
    )


def subject_of(entry: Entry, others: Sequence[Entry] = ()) -> Subject:
    """What the page says of one result, next to ``others``."""
    if isinstance(entry.result, PlanResult):
        alone = not any(isinstance(other.result, LoaderResult) for other in others)
        found = plan_subject(entry.result, entry.detail, with_loader=alone)
    else:
        kinds = (build for kind, build in _SUBJECTS.items() if isinstance(entry.result, kind))
        found = next(kinds, _unknown)(entry)
    return found if found.notes else dataclasses.replace(found, notes=tuple(_notes(entry.result)))


def _rank(entry: Entry, order: Sequence[type]) -> int:
    return next((n for n, kind in enumerate(order) if isinstance(entry.result, kind)), len(order))


def _named(part: Section, name: str) -> Section:
    return Section(f"{part.title} · {name}", part.blocks, part.answer) if name else part


def _of(make: Callable[[Any], Subject]) -> _Build:
    return lambda entry: make(entry.result)


def _text(kind: str, render: Callable[[Any], str]) -> _Build:
    """Builds the part of a result without pictures: the first line, and all of it."""

    def build(entry: Entry) -> Subject:
        text = render(entry.result)
        first = next((line.strip() for line in text.splitlines() if line.strip()), kind)
        return Subject(Headline(kind, "plain", first), tuple(section(kind, Output(text))))

    return build


def _unknown(entry: Entry) -> Subject:
    result = entry.result
    kind = result.FILE.name if isinstance(result, ResultFile) else type(result).__name__
    text = result.to_json() if isinstance(result, ResultFile) else str(result)
    return _text(kind, lambda _: text)(entry)


#: How the page of each kind of result is made, in the order of the page.
_SUBJECTS: Final[Mapping[type, _Build]] = {
    PlanResult: _of(plan_subject),
    SweepResult: _of(sweep_subject),
    GpuComparison: _of(comparison_subject),
    RecordingSummary: lambda entry: recording_subject(entry.result, entry.detail),
    LoaderResult: _of(loader_subject),
    Rehearsal: _of(rehearsal_subject),
    WatchResult: _of(watch_subject),
    AdviceVerification: _of(tried_subject),
    Comparison: _of(runs_subject),
    PaceResult: _of(pace_subject),
    BatchExplanation: _of(trade_subject),
    NoiseResult: _of(noise_subject),
    SnapshotReport: _of(snapshot_subject),
    DoctorResult: _of(doctor_subject),
    Verification: _of(prediction_subject),
    GpusResult: _of(catalogue_subject),
    Profile: _of(profile_subject),
}


# ---
# What each result says of its machine and of versions, in a table of its own.


def machine_sections(results: Sequence[tuple[str, Any]]) -> list[Section]:
    """What each result says of its machine and versions; ``results`` with their files' names."""
    tables: list[Table | None] = [
        table_of(
            ("Subject", "Value"),
            _rows(result),
            f"{name}: machine and versions",
            folded=len(results) > 2,
        )
        for name, result in results
    ]
    sources = [
        table_of(
            ("Figure", "Source"),
            list(result.gpu_sources.items()),
            f"Where the figures of {result.gpu} are from",
            folded=True,
        )
        for _, result in results
        if isinstance(result, PlanResult)
    ]
    return section("Machine and versions", *tables, *sources)


def _rows(result: Any) -> list[tuple[str, str]]:
    for kind, rows in _KINDS.items():
        if isinstance(result, kind):
            return [row for row in rows(result) if row[1]]
    return []


def _plan(result: PlanResult) -> list[tuple[str, str]]:
    cpu = result.cpu
    rows = [
        ("GPU", f"{result.gpu}, {size(result.gpu_memory_bytes)} (simulated)"),
        ("held by other processes", size(result.other_processes_bytes or None).strip("-")),
        ("calibration profile", result.profile or "none: the context is assumed"),
        *result.environment.items(),
        ("simulated", count(result.steps, "step")),
    ]
    if cpu is not None:
        speed = f"{cpu.core_speed:.2g} times the reference (measured)" if cpu.core_speed else ""
        said = (cpu.name, f"{cores(cpu.cores)} cores" if cpu.cores else "",
                ghz(cpu.core_hz) if cpu.core_hz else "", cpu.kind, speed)  # fmt: skip
        rows.append(("CPU", ", ".join(each for each in said if each)))
    return rows


def _loader(result: LoaderResult) -> list[tuple[str, str]]:
    machine = result.machine
    quota = machine.quota_cores
    return [
        ("torch", result.torch),
        ("usable cores", cores(machine.usable_cores)),
        ("physical cores", str(machine.physical_cores or "")),
        ("CPU quota", f"{cores(quota)} cores" if quota is not None else ""),
        ("free RAM", size(machine.available_bytes).strip("-")),
        ("free in /dev/shm", size(machine.shm_free_bytes).strip("-")),
        ("open files", str(machine.open_files or "")),
        ("ranks", str(result.ranks) if result.ranks > 1 else ""),
        ("step time from", result.step_source),
    ]


def _watch(result: WatchResult) -> list[tuple[str, str]]:
    header = result.header
    return [
        ("trainfit", header.trainfit),
        ("Python", header.python),
        ("torch", header.torch or ""),
        ("framework", header.framework),
        ("GPUs", ", ".join(gpu.name for gpu in header.gpus)),
        ("CPU", header.cpu),
        ("usable cores", cores(header.usable_cores) if header.usable_cores else ""),
        ("RAM", size(header.ram_bytes).strip("-")),
        ("precision", " ".join(filter(None, (header.precision, header.autocast)))),
        ("optimizer", header.optimizer),
        ("parameters", f"{header.parameters:,}" if header.parameters else ""),
        ("ranks", str(header.world_size) if header.world_size > 1 else ""),
        *((f"{name} threads", str(number)) for name, number in header.threads.items()),
        *header.variables.items(),
        ("recorded in", result.folder),
    ]


def _pace(result: PaceResult) -> list[tuple[str, str]]:
    return list(result.machine.items())


def _recording(result: RecordingSummary) -> list[tuple[str, str]]:
    return [("GPU", f"{result.gpu} (simulated)"), ("torch", result.torch)]


def _doctor(result: DoctorResult) -> list[tuple[str, str]]:
    return [("trainfit", result.trainfit), ("Python", result.machine.python)]


_KINDS: Final[dict[type, Any]] = {
    PlanResult: _plan,
    LoaderResult: _loader,
    WatchResult: _watch,
    PaceResult: _pace,
    RecordingSummary: _recording,
    DoctorResult: _doctor,
}
