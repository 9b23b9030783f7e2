"""What each result says of its machine and of versions, in a table of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from trainfit.report.blocks import Section, Table, section
from trainfit.report.blocks import table as table_of
from trainfit.results.doctor import DoctorResult
from trainfit.results.loader import LoaderResult
from trainfit.results.memory import RecordingSummary
from trainfit.results.pace import PaceResult
from trainfit.results.plan import PlanResult
from trainfit.results.text import cores, count, ghz, size
from trainfit.results.watch import WatchResult


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
