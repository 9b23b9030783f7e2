"""What a launch command consists of: each part with its reason and its evidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, Literal

from trainfit.results.loader.advice import Evidence

#: What becomes of a part: set to another value; the current value stays; it is left unset;
#: the user has to change the script, for the command cannot say it; nothing tells.
PartStatus = Literal["set", "kept", "not set", "by hand", "cannot tell"]

#: How the reason of a part begins that would help a job that did not fit.
NOT_NEEDED: Final = "not needed: it fits"

#: Where it is written: before the command, as a program before the user's (taskset), as an
#: argument of the command, or in the script.
PartPlace = Literal["environment", "wrapper", "argument", "script"]


@dataclasses.dataclass(frozen=True)
class LaunchPart:
    """One parameter of a launch command.

    ``name`` is what the user would search for ("OMP_NUM_THREADS", "num_workers", "amp");
    ``value`` is the recommended one and ``present`` the user's, as they are written (empty: there
    is none; a variable that is "not set" and has a present value is to be removed). ``reason`` is
    one line. ``machine`` says which machine or GPU the evidence is from (empty: it is of none).
    Where ``status`` is "by hand", ``line`` is what to write ("num_workers=4"), ``call`` the call of
    which that is an argument ("DataLoader"; empty: it is a line of its own) and ``place`` where it
    stands ("train.py:41"; empty: not known).
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
    place: str = ""
    call: str = ""


def changes_by_hand(parts: Sequence[LaunchPart]) -> list[tuple[str, str]]:
    """What the user has to change in the script: each place with what to write there, arguments
    of one call together."""
    calls: dict[tuple[str, str], list[str]] = {}
    for part in parts:
        if part.status == "by hand":
            calls.setdefault((part.place, part.call), []).append(part.line)
    return [
        (place, f"{call}(…, {', '.join(lines)})" if call else "; ".join(lines))
        for (place, call), lines in calls.items()
    ]


@dataclasses.dataclass(frozen=True)
class AllocatorTrial:
    """The launched job with the caching allocator as it is set, and with the other kind of segment.

    ``present`` is the setting in force, ``variable`` the variable of the environment that holds it.
    ``expandable``: that has expandable segments; then the other has not. Bytes are of reserved
    memory at its peak, at ``batch_size`` (``None``: not known); ``fits`` and ``other_fits`` say
    whether the job runs on the GPU.
    """

    variable: str
    present: str
    expandable: bool
    batch_size: int | None
    reserved_bytes: int
    other_reserved_bytes: int
    fits: bool
    other_fits: bool
