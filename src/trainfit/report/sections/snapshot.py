"""A memory snapshot of PyTorch: where memory ran out or was at its most, of what, and why."""

from __future__ import annotations

from typing import Final

from trainfit.findings.out_of_memory import KINDS
from trainfit.report.blocks import (
    WHOLE,
    Facts,
    Headline,
    Subject,
    Table,
    Tile,
    facts,
    section,
    table,
)
from trainfit.report.notes import finding_items, plain
from trainfit.results.memory import SettingOutcome, SnapshotOwner, SnapshotReport
from trainfit.results.text import count, percent, share, size

_OWNERS: Final = 20


def snapshot_subject(report: SnapshotReport) -> Subject:
    """The failure or the peak in a sentence, its causes, and what memory consisted of."""
    return Subject(
        Headline(
            kind="Memory snapshot",
            tone="plain" if report.fits else "bad",
            text=_answer(report),
            subject=report.file,
            tiles=_tiles(report),
        ),
        (
            *section("Why", finding_items(report.findings, detail=2)),
            *section("Allocated then", _kinds(report)),
            *section("Made by", _owners(report), _files(report)),
            *section("Allocator", _allocator(report), _settings(report)),
        ),
        tuple(plain(list(report.notes))),
    )


def _answer(report: SnapshotReport) -> str:
    held = f"{size(report.allocated_bytes)} of tensors, {size(report.reserved_bytes)} reserved"
    gpu = f"GPU {report.gpu_index}"
    if report.requested_bytes is not None:
        free = report.device_free_bytes
        left = f", {size(free)} free on the GPU" if free is not None else ""
        again = f" ({count(report.failures, 'failed request')})" if report.failures > 1 else ""
        asked = f"{size(report.requested_bytes)} asked for{again}"
        return f"Out of memory on {gpu}: {asked}; {held}{left}."
    if report.why == "peak":
        return f"Most memory on {gpu}: {held} at entry {report.event} of {report.events}."
    return f"Memory on {gpu} when the snapshot was written: {held}."


def _tiles(report: SnapshotReport) -> tuple[Tile, ...]:
    tiles = [
        Tile("Allocated", size(report.allocated_bytes)),
        Tile("Reserved", size(report.reserved_bytes)),
    ]
    if report.requested_bytes is not None:
        tiles.insert(0, Tile("Asked for", size(report.requested_bytes), tone="bad"))
    return tuple(tiles)


def _kinds(report: SnapshotReport) -> Facts | None:
    total = report.allocated_bytes
    return facts(
        *(
            (KINDS.get(kind, kind), f"{size(nbytes)}, {share(nbytes, total)}")
            for kind, nbytes in report.by_kind_bytes.items()
            if nbytes
        ),
        detail=4,
    )


def _owners(report: SnapshotReport) -> Table | None:
    cells = [_owner(owner) for owner in report.owners[:_OWNERS]]
    columns: tuple[str, ...] = ("Memory", "Blocks", "Kind", "Line", "Operator", "From")
    if not any(row[-1] for row in cells):
        columns, cells = columns[:-1], [row[:-1] for row in cells]
    return table(
        columns,
        cells,
        "What the most memory was made by",
        (0, 1),
        spare=("From", "Blocks", "Operator"),
        detail=10,
    )


def _owner(owner: SnapshotOwner) -> tuple[str, ...]:
    outer = owner.user_line if owner.user_line not in (None, owner.line) else None
    return (
        size(owner.nbytes),
        str(owner.blocks),
        KINDS.get(owner.kind, owner.kind),
        owner.line or "-",
        owner.operator or "-",
        outer or "",
    )


def _files(report: SnapshotReport) -> Table | None:
    total = report.allocated_bytes
    return table(
        ("File", "Memory", "Of all"),
        [
            (name, size(nbytes), percent(nbytes / total))
            for name, nbytes in list(report.files_bytes.items())[:_OWNERS]
            if nbytes and total
        ],
        "Memory that modules made, by the file of their code",
        (1, 2),
    )


def _allocator(report: SnapshotReport) -> Facts | None:
    unused = report.reserved_bytes - report.allocated_bytes
    largest = report.largest_free_bytes
    text = f"{size(unused)}, {share(unused, max(report.reserved_bytes, 1))} of reserved"
    if largest is not None:
        text += f"; largest free block {size(largest)}"
    pending = report.pending_bytes
    others = ", ".join(
        f"{name}: {size(nbytes)}" for name, nbytes in report.other_gpus_bytes.items()
    )
    return facts(
        ("reserved, unused", text, 30),
        ("waiting", f"{size(pending)} freed, in use by another stream" if pending else "", WHOLE),
        ("settings", report.conf or "", 40),
        ("other GPUs", ", ".join(others), 20),
        ("history", f"{report.events} entries" if report.events else "", WHOLE),
    )


def _settings(report: SnapshotReport) -> Table | None:
    return table(
        ("Allocator setting, replayed", "Reserved", "At this GPU"),
        [_setting(setting) for setting in report.settings],
        "The same requests under other settings of the allocator",
        (1,),
    )


def _setting(outcome: SettingOutcome) -> tuple[str, str, str]:
    verdict = "fits" if outcome.fits else "does not fit"
    return outcome.setting or "as it was", size(outcome.reserved_bytes), verdict
