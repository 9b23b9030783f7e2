"""The kernel's count of OOM kills.

``oom_kill`` of /proc/vmstat counts the machine's (mm/oom_kill.c counts every victim there);
of a cgroup it is in ``memory.events`` (version 2) or ``memory.oom_control`` (version 1, since
Linux 4.13). A container often sees only its own cgroup's.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainfit.hardware.host.cgroup import own_levels
from trainfit.hardware.host.system import System


@dataclass(frozen=True)
class OomKills:
    """Processes killed so far; ``None``: the counter cannot be read."""

    cgroup: int | None = None
    machine: int | None = None


def oom_kills(system: System | None = None) -> OomKills:
    """The counters now. Read them before a run and after it."""
    system = system or System()
    cgroups: list[int] = []
    levels = own_levels(system, "memory").value
    for level in levels.levels if levels is not None else ():
        count = _count(system, level.file("memory.oom_control", "memory.events"))
        if count is not None:
            cgroups.append(count)
    # Those above count what happens below them, too.
    return OomKills(max(cgroups, default=None), _count(system, "/proc/vmstat"))


def between(before: OomKills, after: OomKills) -> OomKills:
    """Processes killed from ``before`` to ``after``."""
    return OomKills(
        _difference(before.cgroup, after.cgroup), _difference(before.machine, after.machine)
    )


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(0, after - before)


def _count(system: System, path: str) -> int | None:
    text = system.text(path).value
    for line in (text or "").split("\n"):
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip().isdecimal():
            return int(number)
    return None
