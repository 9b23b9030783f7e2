"""What a launch command consists of: each part with its reason and its evidence."""

from __future__ import annotations

import dataclasses
from typing import Literal

#: What becomes of a part: set to another value; the present value stays; it is left unset;
#: the user has to change the script, for the command cannot say it; nothing tells.
PartStatus = Literal["set", "kept", "not set", "by hand", "cannot tell"]

#: Where it is written: before the command, as a program before the user's (taskset), as an
#: argument of the command, or in the script.
PartPlace = Literal["environment", "wrapper", "argument", "script"]

#: What the reason rests on; empty: it needs none ("the script has no DataLoader").
Evidence = Literal["measured", "predicted", "assumed", ""]


@dataclasses.dataclass(frozen=True)
class LaunchPart:
    """One parameter of a launch command.

    ``name`` is what the user would search for ("OMP_NUM_THREADS", "num_workers", "amp");
    ``value`` is the recommended one and ``present`` the user's, as they are written (empty: there
    is none). ``reason`` is one line. ``machine`` says which machine or GPU the evidence is from
    (empty: it is of none). ``line`` is what to write, where ``status`` is "by hand", with the place
    of the script in front of it ("train.py:41: DataLoader(…, num_workers=4)").
    """

    name: str
    status: PartStatus
    where: PartPlace
    reason: str
    value: str = ""
    present: str = ""
    evidence: Evidence = ""
    machine: str = ""
    line: str = ""


@dataclasses.dataclass(frozen=True)
class ScriptOption:
    """An option that a script's own command line understands.

    ``flags`` are its spellings ("--num_workers", "-j"; a plain name for ``name=value`` words),
    ``name`` the attribute that its parser gives it, ``value`` what it had in the run as text
    (``None``: None), ``given`` whether the command says it, or it is the default. ``choices`` are
    the values that it takes (none: any). ``switch``: it takes no value.

    ``default`` is what it has where the command does not say it. ``off`` are spellings without a
    value that make it false ("--no-amp"). ``bare``: it may stand with a value and without.
    ``type`` is the name of what reads its value ("int", "str2bool"; empty: not known); "bool" is
    Python's, which takes every text but the empty one for true. ``ahead``: it must come before the
    script's other arguments (a subcommand takes what follows it).
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
