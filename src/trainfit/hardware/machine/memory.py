"""RAM, swap, what the cgroups leave of it, and /dev/shm."""

from __future__ import annotations

import dataclasses
import re

from trainfit.hardware.machine.cgroup import CgroupLevel, own_levels, tightest
from trainfit.hardware.machine.parsing import asked, keyed_kilobytes, natural, natural_at
from trainfit.hardware.machine.system import Space, System
from trainfit.results.machine import Fact, Memory, absent, cannot_tell, known

MEMINFO = "/proc/meminfo"
SHM = "/dev/shm"

#: Version 1 writes "no limit" as the greatest number of whole pages below 2⁶³ bytes.
_NO_LIMIT = 1 << 62


def read_memory(system: System) -> Memory:
    """Every fact of the memory; none of them raises."""
    swap_total = _meminfo(system, "SwapTotal")
    limit, limit_used = _limit(system)
    space: Fact[Space] = asked(SHM, lambda: system.space(SHM))
    return Memory(
        total_bytes=_meminfo(system, "MemTotal"),
        available_bytes=_meminfo(system, "MemAvailable"),
        swap_total_bytes=_swap(swap_total, swap_total),
        swap_used_bytes=_swap(swap_total, _swap_used(system, swap_total)),
        limit_bytes=limit,
        limit_used_bytes=limit_used,
        shm_total_bytes=space.map(lambda found: found.total, "a size"),
        shm_free_bytes=space.map(lambda found: found.free, "a size"),
    )


def _meminfo(system: System, key: str) -> Fact[int]:
    text = system.text(MEMINFO)
    if text.value is None:
        return cannot_tell(MEMINFO, text.reason)
    try:
        return known(keyed_kilobytes(text.value, key), f"{MEMINFO} ({key})")
    except ValueError as error:
        return cannot_tell(f"{MEMINFO} ({key})", str(error))


def _swap_used(system: System, total: Fact[int]) -> Fact[int]:
    free = _meminfo(system, "SwapFree")
    if total.value is None or free.value is None:
        return free
    if free.value > total.value:
        return cannot_tell(free.source, "free exceeds total")
    return known(total.value - free.value, f"{MEMINFO} (SwapTotal, SwapFree)")


def _swap(total: Fact[int], fact: Fact[int]) -> Fact[int]:
    return absent(total.source, "no swap is configured") if total.value == 0 else fact


# --- The cgroups' limit -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SharedLimit:
    """Memory in bytes that a cgroup grants to all that run in it."""

    limit_bytes: int
    level: CgroupLevel

    def used_bytes(self, system: System) -> int | None:
        """What counts towards it now; ``None``: not told."""
        return _used(system, self.level).value


def shared_limit(system: System, process: str) -> SharedLimit | None:
    """The least memory limit of a process' cgroups; ``None``: none, or it cannot be told."""
    found = tightest(system, "memory", lambda level: _limit_of(system, level), process).value
    return None if found is None else SharedLimit(int(found[0]), found[1])


def _limit(system: System) -> tuple[Fact[int], Fact[int]]:
    """The least memory limit of the own cgroup and those above, and what counts towards it."""
    found = tightest(system, "memory", lambda level: _limit_of(system, level))
    hidden = _hidden_limit(system)
    if found.value is None:
        if hidden.value is None:
            nothing: Fact[int] = Fact(found.state, None, found.source, found.reason)
            return nothing, nothing
        return hidden, _of_another(hidden)
    limit, level = found.value
    if hidden.value is not None and hidden.value < limit:
        return hidden, _of_another(hidden)
    return known(int(limit), found.source), _used(system, level)


def _of_another(limit: Fact[int]) -> Fact[int]:
    return cannot_tell(limit.source, "the limit is of a cgroup that is not visible from here")


def _limit_of(system: System, level: CgroupLevel) -> Fact[float]:
    text = system.text(level.file("memory.limit_in_bytes", "memory.max"))
    if text.value == "max":
        return absent(text.source, "no limit")
    limit = text.map(natural, "a number of bytes")
    if limit.value is not None and limit.value >= _NO_LIMIT:
        return absent(text.source, "no limit")
    return limit.map(float, "a number of bytes")


def _hidden_limit(system: System) -> Fact[int]:
    """Version 1 knows in each cgroup the least limit of all above it, visible or not."""
    levels = own_levels(system, "memory")
    for level in levels.value.levels if levels.value is not None else ():
        if level.version != 1:
            continue
        stat = system.text(level.file("memory.stat", ""))
        limit = stat.map(lambda text: _entry(text, "hierarchical_memory_limit"), "a limit")
        if limit.value is not None and 0 < limit.value < _NO_LIMIT:
            return known(limit.value, f"{stat.source} (hierarchical_memory_limit)")
        break
    return absent("memory.stat", "no limit in parent cgroups")


def _used(system: System, level: CgroupLevel) -> Fact[int]:
    """What the cgroup holds, less file cache that the kernel drops when memory runs short.

    That part is ``inactive_file``, as Kubernetes' working set and `docker stats` have it.
    """
    usage = natural_at(system, level.file("memory.usage_in_bytes", "memory.current"))
    stat = system.text(level.file("memory.stat", "memory.stat"))
    key = level.file("total_inactive_file", "inactive_file").rpartition("/")[2]
    cache = stat.map(lambda text: _entry(text, key), f"statistics with {key}")
    for fact in (usage, cache):
        if fact.value is None:
            return cannot_tell(fact.source, fact.reason)
    assert usage.value is not None and cache.value is not None
    return known(max(usage.value - cache.value, 0), f"{usage.source} less {key}")


def _entry(text: str, key: str) -> int | None:
    found = re.search(rf"(?m)^{key} ([0-9]{{1,20}})$", text)
    return None if found is None else natural(found[1])
