"""What ``trainfit doctor`` found: checks of the machine and findings in a script."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from trainfit.results.files.documents import Format, ResultFile
from trainfit.results.findings import Finding
from trainfit.results.machine import Machine

Verdict = Literal["good", "bad", "cannot_tell"]


@dataclasses.dataclass(frozen=True)
class Check(Finding):
    """What one check of the machine found, with its verdict.

    ``kind`` is empty where nothing is wrong; ``cause`` says what it means for a job, or what would
    be needed to tell.
    """

    name: str = ""
    verdict: Verdict = "good"


PoolLibrary = Literal["OpenCV", "OpenBLAS"]


@dataclasses.dataclass(frozen=True)
class PoolUse:
    """A library with threads of its own in a script: ``call`` is a function that DataLoader
    workers certainly run (``in_worker``), or a module that is imported."""

    library: PoolLibrary
    call: str
    file: str
    line: int
    in_worker: bool


@dataclasses.dataclass(frozen=True)
class WorkerPools:
    """Libraries with thread pools that a script's DataLoader workers run.

    ``workers`` is the largest ``num_workers`` (``None``: not a number in the script). ``uses``
    has no library whose threads the script sets itself.
    """

    has_workers: bool
    workers: int | None
    uses: tuple[PoolUse, ...] = ()


@dataclasses.dataclass(frozen=True)
class ScriptReport:
    """What the static reading of a script found; ``unread`` are files that it could not read,
    ``pools`` thread pools of its workers (``None``: not looked for)."""

    script: str
    files: tuple[str, ...]
    findings: tuple[Finding, ...]
    unread: tuple[str, ...] = ()
    pools: WorkerPools | None = None


@dataclasses.dataclass(frozen=True)
class DoctorResult(ResultFile):
    """All checks in the order they were made, and the facts that they rest on."""

    FILE: ClassVar = Format.of("trainfit-doctor", "trainfit doctor --output")

    checks: tuple[Check, ...]
    machine: Machine
    script: ScriptReport | None
    seconds: float
    trainfit: str

    @property
    def is_bad(self) -> bool:
        """Is anything bad, on the machine or in the script?"""
        found = self.script is not None and bool(self.script.findings)
        return found or any(check.verdict == "bad" for check in self.checks)
