"""What ``trainfit doctor`` found: checks of the machine and findings in a script.

Format history
    1   first version
    2   "fixes" of a check (was "remedies")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

from trainfit.results.files.documents import Format, ResultFile, Upgrade, rename_key
from trainfit.results.machine import Machine

FORMAT: Final = "trainfit-doctor"
VERSION: Final = 2

Verdict = Literal["good", "bad", "cannot_tell"]

_REMAKE: Final = "re-create it with `trainfit doctor --output FILE`"
_WANTED: Final = "give a file that `trainfit doctor --output` wrote"


def _upgrade_terms(document: dict[str, Any]) -> None:
    rename_key(document, "checks", "remedies", "fixes")


_UPGRADES: Final[Mapping[int, Upgrade]] = {1: _upgrade_terms}


@dataclasses.dataclass(frozen=True)
class Fix:
    """A fix of a bad check: a command or a line to write, its undo and its cost."""

    command: str
    undo: str
    cost: str


@dataclasses.dataclass(frozen=True)
class Evidence:
    """One fact that a verdict rests on: what it is, its value in words, where it was read."""

    what: str
    value: str
    source: str


@dataclasses.dataclass(frozen=True)
class Check:
    """One verdict.

    ``cause`` is a stable identifier ("driver_too_old"), empty where nothing is wrong; ``why``
    says in words what it means for a job, or what would be needed to tell.
    """

    name: str
    verdict: Verdict
    cause: str
    summary: str
    why: str = ""
    evidence: tuple[Evidence, ...] = ()
    fixes: tuple[Fix, ...] = ()


@dataclasses.dataclass(frozen=True)
class Finding:
    """A habit in a script that costs memory or speed on a GPU, or breaks portability.

    ``line`` and ``column`` count from 1. ``source`` is the line as it stands, ``rewrite``
    what to write instead.
    """

    rule: str
    file: str
    line: int
    column: int
    source: str
    reason: str
    rewrite: str


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

    FILE: ClassVar = Format(FORMAT, VERSION, _REMAKE, _WANTED, upgrades=_UPGRADES)

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
