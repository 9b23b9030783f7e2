"""Limits of this process's cgroups, version 1 and 2.

A limit holds for everything below it, so that of a process is the tightest of its own cgroup
and those above it (Documentation/admin-guide/cgroup-v2.rst, "Top-down Constraint"; cgroup-v1
likewise). From within a container only those up to its own are visible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainfit.hardware.machine.parsing import cpus_at, natural, natural_at
from trainfit.hardware.machine.storage import Mount, normal, read_mounts, relative
from trainfit.hardware.machine.system import System
from trainfit.results.machine import Fact, absent, cannot_tell, known

CGROUP = "/proc/self/cgroup"
#: This process, in the place of a PID.
SELF = "self"

#: Deeper nesting than any real one.
_DEEPEST = 100


@dataclasses.dataclass(frozen=True)
class CgroupLevel:
    """The folder of one cgroup that this process is in."""

    folder: str
    version: int

    def file(self, version_1: str, version_2: str) -> str:
        return f"{self.folder.rstrip('/')}/{version_1 if self.version == 1 else version_2}"


@dataclasses.dataclass(frozen=True)
class CgroupLevels:
    """The cgroups of a process, from its own upwards; ``missing`` says why its own is not among
    them."""

    levels: tuple[CgroupLevel, ...]
    missing: str = ""


def cpu_quota(system: System) -> Fact[float]:
    """The CPU time that the cgroups grant, in cores; absent: no limit."""
    found = tightest(system, "cpu", lambda level: _quota(system, level))
    return found.map(lambda limit: limit[0], "a quota")


@dataclasses.dataclass(frozen=True)
class SharedQuota:
    """CPU time that a cgroup grants, in ``cores``, to all that run in it."""

    cores: float
    level: CgroupLevel

    def used_s(self, system: System) -> float | None:
        """CPU seconds that all in it have used so far; ``None`` where that is not told."""
        if self.level.version == 1:
            spent = natural_at(system, self.level.file("cpuacct.usage", "")).value
            return None if spent is None else spent / 1e9
        for line in (system.text(self.level.file("", "cpu.stat")).value or "").splitlines():
            name, _, number = line.partition(" ")
            if name == "usage_usec" and number.isascii() and number.isdigit():
                return int(number) / 1e6
        return None


def shared_quota(system: System, process: str = SELF) -> SharedQuota | None:
    """The tightest CPU quota of a process; ``None``: none, or it cannot be told."""
    value = tightest(system, "cpu", lambda level: _quota(system, level), process).value
    return None if value is None else SharedQuota(*value)


def cpuset(system: System) -> Fact[tuple[int, ...]]:
    """The CPUs that the own cgroup may use, where it says so."""
    levels = own_levels(system, "cpuset")
    for level in levels.value.levels if levels.value is not None else ():
        cpus = cpus_at(system, level.file("cpuset.effective_cpus", "cpuset.cpus.effective"))
        if cpus.value:
            return cpus
    return cannot_tell(CGROUP, "no cgroup of this process lists its CPUs")


def tightest(
    system: System,
    controller: str,
    read: Callable[[CgroupLevel], Fact[float]],
    process: str = SELF,
) -> Fact[tuple[float, CgroupLevel]]:
    """The least limit that ``read`` finds in the own cgroup (that of ``process``, a PID) and those
    above it.

    Absent: none of them limits. One that cannot be read leaves open what the limit is.
    """
    levels = own_levels(system, controller, process)
    if levels.value is None:
        return cannot_tell(levels.source, levels.reason)
    best: Fact[tuple[float, CgroupLevel]] | None = None
    unread: Fact[float] | None = None
    for level in levels.value.levels:
        limit = read(level)
        if limit.value is None:
            unread = unread or (None if limit.is_absent else limit)
        # Of equals the upper one: it counts more processes.
        elif best is None or best.value is None or limit.value <= best.value[0]:
            best = known((limit.value, level), limit.source)
    if unread is not None:
        return cannot_tell(unread.source, unread.reason)
    if best is not None:
        return best
    if levels.value.missing:
        return cannot_tell(CGROUP, levels.value.missing)
    return absent(levels.source, f"no cgroup of this process limits {controller}")


def own_levels(system: System, controller: str, process: str = SELF) -> Fact[CgroupLevels]:
    """The cgroups of a process that a controller may limit, from its own upwards."""
    text, mounts = system.text(f"/proc/{process}/cgroup"), read_mounts(system)
    for fact in (text, mounts):
        if fact.value is None:
            return cannot_tell(fact.source, fact.reason)
    assert text.value is not None and mounts.value is not None
    path_1, path_2 = _own_paths(text.value, controller)
    found: list[CgroupLevels] = []
    if path_1 is not None:
        hierarchy = [m for m in mounts.value if _is_version_1(m, controller)]
        found.append(_levels(system, path_1, hierarchy, 1))
    # Of a hybrid hierarchy either version may have the controller.
    if path_2 is not None:
        unified = [mount for mount in mounts.value if mount.filesystem == "cgroup2"]
        if path_1 is None or unified:
            found.append(_levels(system, path_2, unified, 2))
    if not found:
        return cannot_tell(CGROUP, "it lists no cgroup")
    together = tuple(level for each in found for level in each.levels)
    source = together[0].folder if together else CGROUP
    return known(CgroupLevels(together, found[0].missing), source)


def _own_paths(text: str, controller: str) -> tuple[str | None, str | None]:
    """The own cgroup in version 1's hierarchy of a controller, and in version 2's."""
    path_1 = path_2 = None
    for line in text.split("\n"):
        number, colon, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon or not path.startswith("/") or "\0" in path:
            continue
        if number == "0" and not controllers:
            path_2 = path
        elif controller in controllers.split(","):
            path_1 = path
    return path_1, path_2


def _is_version_1(mount: Mount, controller: str) -> bool:
    return mount.filesystem == "cgroup" and controller in mount.options


def _levels(system: System, path: str, mounts: Sequence[Mount], version: int) -> CgroupLevels:
    if not mounts:
        return CgroupLevels((), f"the file system of cgroup version {version} is not mounted here")
    mount, inside = _placed(path, mounts)
    if inside is None:
        # Outside the cgroup namespace: its names are not shown, only what is mounted.
        shown = CgroupLevel(mount.point, version)
        return CgroupLevels((shown,), f"its own cgroup {path[:100]} is not visible from here")
    parts = [part for part in normal(inside).split("/") if part]
    if len(parts) > _DEEPEST:
        return CgroupLevels((), f"its own cgroup is nested {len(parts)} levels deep")
    folders = [
        "/".join([mount.point.rstrip("/"), *parts[:n]]) or "/" for n in range(len(parts) + 1)
    ]
    there = tuple(CgroupLevel(f, version) for f in reversed(folders) if system.exists(f))
    missing = "" if there and there[0].folder == folders[-1] else f"there is no {folders[-1][:200]}"
    return CgroupLevels(there, missing)


def _placed(path: str, mounts: Sequence[Mount]) -> tuple[Mount, str | None]:
    """The mount that shows a cgroup, and the cgroup's path within it."""
    best: tuple[Mount, str] | None = None
    for mount in mounts:
        if ".." in f"{path}/{mount.root}".split("/"):
            continue
        inside = relative(path, mount.root)
        if inside is not None and (best is None or len(mount.root) > len(best[0].root)):
            best = mount, inside
    return best or (mounts[0], None)


def _quota(system: System, level: CgroupLevel) -> Fact[float]:
    if level.version == 2:
        return _quota_of(system.text(level.file("", "cpu.max")))
    quota = system.text(level.file("cpu.cfs_quota_us", ""))
    if quota.value is None or quota.value.startswith("-"):
        none: Fact[float] = absent(quota.source, "no limit")
        return (
            none if quota.value is not None else Fact(quota.state, None, quota.source, quota.reason)
        )
    period = system.text(level.file("cpu.cfs_period_us", ""))
    if period.value is None:
        return cannot_tell(period.source, period.reason)
    return _quota_of(known(f"{quota.value} {period.value}", quota.source))


def _quota_of(text: Fact[str]) -> Fact[float]:
    """CPUs of a quota as the kernel writes it ("200000 100000", both in µs; "max" is no limit)."""
    if text.value is not None and text.value.split(" ")[0] == "max":
        return absent(text.source, "no limit")
    return text.map(_cores, "a quota and a period in µs")


def _cores(text: str) -> float:
    quota, period = (natural(number) for number in text.split())
    if not quota or not period:
        raise ValueError("a quota of 0")
    return quota / period


# ---
# The kernel's count of OOM kills.
#
# ``oom_kill`` of /proc/vmstat counts the machine's (mm/oom_kill.c counts every victim there);
# of a cgroup it is in ``memory.events`` (version 2) or ``memory.oom_control`` (version 1, since
# Linux 4.13). A container often sees only its own cgroup's.


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
