"""The machine, versions, checks of the machine and of a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from trainfit.report.blocks import (
    Command,
    Headline,
    Item,
    Items,
    Section,
    Table,
    Tone,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.results.doctor import Check, DoctorResult
from trainfit.results.loader import LoaderResult
from trainfit.results.memory import RecordingSummary
from trainfit.results.pace import PaceResult
from trainfit.results.plan import PlanResult
from trainfit.results.text import cores, count, ghz, size
from trainfit.results.watch import WatchResult

_TONES: Final[dict[str, Tone]] = {"bad": "bad", "cannot_tell": "warn", "good": "good"}


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


# -- checks ------------------------------------------------------------------------------------


def doctor_headline(result: DoctorResult) -> Headline:
    """How many checks are bad, and the first of them."""
    bad = [check for check in result.checks if check.verdict == "bad"]
    good = sum(check.verdict == "good" for check in result.checks)
    unknown = len(result.checks) - len(bad) - good
    script = len(result.script.findings) if result.script is not None else 0
    counts = f"{len(bad)} bad, {unknown} unknown, {good} good."
    if script:
        counts += f" {count(script, 'finding')} in the script."
    worst = bad[0].title if bad else ""
    fixes = [fix.action for check in bad[:1] for fix in check.fixes[:1]]
    return Headline(
        kind="Machine check",
        tone="bad" if bad else "warn" if script else "good",
        text=f"{worst[:1].upper()}{worst[1:]}." if worst else counts,
        limit=f"Checks: {counts}" if worst else "",
        commands=tuple(Command(fix, "Fix") for fix in fixes),
    )


def doctor_sections(result: DoctorResult) -> list[Section]:
    """Checks, bad ones first, and findings in the script."""
    order = ("bad", "cannot_tell", "good")
    checks = sorted(result.checks, key=lambda check: order.index(check.verdict))
    told = [check for check in checks if check.verdict != "good"]
    good = [(check.name, check.title) for check in checks if check.verdict == "good"]
    return [
        *section("Checks of the machine", Items(tuple(map(_check, told))) if told else None,
                 table_of(("Good", "What was found"), good)),
        *section("Habits in the script", _script(result)),
    ]  # fmt: skip


def _check(check: Check) -> Item:
    return Item(
        check.title,
        _TONES[check.verdict],
        check.name,
        (
            ("why" if check.verdict == "bad" else "needed", check.cause),
            *(("evidence", f"{e.what}: {e.value} ({e.source})") for e in check.evidence),
            *(("undo and cost", f"{fix.undo}; {fix.cost}") for fix in check.fixes),
        ),
        tuple(Command(fix.action, "Fix") for fix in check.fixes),
    )


def _script(result: DoctorResult) -> Items | None:
    if result.script is None or not result.script.findings:
        return None
    return Items(
        tuple(
            Item(
                each.cause,
                "warn",
                each.kind,
                (("where", str(each.at)), ("now", each.at.source),
                 ("write", each.fix.action)),
            )
            for each in result.script.findings
        )
    )  # fmt: skip
