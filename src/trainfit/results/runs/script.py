"""A user's script: its options, its launcher, and how it is kept from changing files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from trainfit.results.files.decoding import Exchanged, as_json, decode, write_whole

#: "overlay": writes go to a layer over the whole file system. "redirection": Python's file calls
#: go to a layer, and Landlock refuses the writes of other code where ``guarded``. "none": the
#: user allowed writes, or nothing that protects works here (then no script was run).
ProtectionKind = Literal["overlay", "redirection", "none"]

#: Names in the folder of a run.
REQUEST_NAME = "sandbox.json"
PROTECTION_NAME = "protection.json"

#: Packages of kernels for GPUs that `simgpu/stand_ins` can take the place of, by the names that are
#: imported; and the variable of a run's environment that names those it does, with commas between.
STAND_INS: Final = ("causal_conv1d", "flash_attn", "mamba_ssm", "triton", "xformers")
STAND_INS_VARIABLE: Final = "TRAINFIT_STAND_INS"


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
        """The protection of the run in ``folder``; ``None`` where none was asked for or nothing was
        told."""
        try:
            return decode(cls, json.loads((folder / PROTECTION_NAME).read_text()))
        except (OSError, ValueError):
            return None


# ---
# An option of a script's own command line.


@dataclasses.dataclass(frozen=True)
class ScriptOption:
    """An option that a script's own command line understands.

    ``flags`` are its spellings ("--num_workers", "-j"; a plain name for ``name=value`` words),
    ``name`` the attribute that its parser gives it, ``value`` what it had in the run as text
    (``None``: None), ``given`` whether the command says it, or it is the default. ``choices`` are
    its allowed values (none: any). ``switch``: it has no value.

    ``default`` is what it has where the command does not say it. ``off`` are spellings without a
    value that make it false ("--no-amp"). ``bare``: it may stand with a value and without.
    ``type`` is the name of what reads its value ("int", "str2bool"; empty: not known); "bool" is
    Python's, for which every text but the empty one is true. ``ahead``: it must come before the
    script's other arguments (a subcommand parses what follows it).
    """

    flags: tuple[str, ...]
    name: str
    value: str | None
    given: bool
    choices: tuple[str, ...] = ()
    switch: bool = False
    default: str | None = None
    off: tuple[str, ...] = ()
    bare: bool = False
    type: str = ""
    ahead: bool = False


# ---
# What a launcher (torchrun, accelerate launch) would start, as its own code reads its words.


#: Launchers by the module that ``python -m`` runs.
LAUNCHER_MODULES: Final = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}


@dataclasses.dataclass(frozen=True)
class Launched(Exchanged):
    """The processes that a launcher starts.

    ``processes`` is their number on all ``machines`` together (``per_gpu``: one for each GPU that
    there is); ``words`` how many of the launcher's last words are the script and its arguments;
    ``kind`` says what the first of them is. ``arguments`` come before the script's own.
    ``variables`` are what the process of rank 0 finds in its environment in addition to the
    launcher's. ``error``: why the launcher refuses its words, else empty.
    """

    processes: int = 1
    words: int = 0
    kind: Literal["script", "module", "program"] = "script"
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    error: str = ""
    machines: int = 1
    per_gpu: bool = False
