"""How a user's script is kept from changing files: what is asked for, and what was in force."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Final, Literal

from trainfit.results.files.decoding import decode
from trainfit.results.files.exchange import as_json, write_whole

#: "overlay": writes go to a layer over the whole file system. "redirection": Python's file calls
#: go to a layer, and Landlock refuses the writes of other code where ``guarded``. "none": the
#: user allowed writes, or nothing that protects works here (then no script was run).
ProtectionKind = Literal["overlay", "redirection", "none"]

#: Names in the folder of a run.
REQUEST_NAME = "sandbox.json"
PROTECTION_NAME = "protection.json"


@dataclasses.dataclass(frozen=True)
class SandboxRequest:
    """How a run is to be protected.

    ``allow_writes``: not at all. ``keep`` is the folder that gets a copy of what was written
    ("" for none), ``limit_bytes`` the most that may be written (``None``: a default that
    depends on the free space). ``kinds`` are tried in order; ``guard`` has Landlock refuse what
    cannot be redirected.
    """

    allow_writes: bool = False
    keep: str = ""
    limit_bytes: int | None = None
    kinds: tuple[ProtectionKind, ...] = ("overlay", "redirection")
    guard: bool = True

    def save(self, folder: Path) -> None:
        write_whole(folder / REQUEST_NAME, as_json(self))

    @classmethod
    def load(cls, folder: Path) -> SandboxRequest:
        return decode(cls, json.loads((folder / REQUEST_NAME).read_text()))


#: How a run is protected where the user says nothing of it.
UNASKED: Final = SandboxRequest()


@dataclasses.dataclass(frozen=True)
class Protection:
    """What kept a script from changing files, and what it wrote instead.

    ``detail`` says in words what is weaker than an overlay over everything, and why. ``files``
    and ``bytes`` are in the layer when the script ended (without Python's bytecode); ``notes``
    tell of what was skipped or ended (an upload, a daemon). ``stopped`` is the reason, in one
    line, for which the sandbox ended the run or did not start it.
    """

    kind: ProtectionKind
    detail: str = ""
    guarded: bool = True
    files: int = 0
    bytes: int = 0
    removed: int = 0
    notes: tuple[str, ...] = ()
    stopped: str = ""

    @property
    def not_run(self) -> bool:
        """Nothing protects here, and the script was not started."""
        return self.kind == "none" and bool(self.stopped)

    def save(self, folder: Path) -> None:
        write_whole(folder / PROTECTION_NAME, as_json(self))

    @classmethod
    def load(cls, folder: Path) -> Protection | None:
        """Of the run in ``folder``; ``None`` where none was asked for or nothing was told."""
        try:
            return decode(cls, json.loads((folder / PROTECTION_NAME).read_text()))
        except (OSError, ValueError):
            return None
