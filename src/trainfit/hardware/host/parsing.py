"""Reading the small texts of /proc and /sys: numbers, lists of CPUs, and calls that may fail."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from trainfit.hardware.host.system import System
from trainfit.results.files.facts import Fact, cannot_tell

T = TypeVar("T")

#: Linux has at most 8192 CPUs (x86's NR_CPUS); what counts further is no list of CPUs.
_MOST_CPUS = 1 << 14
_MOST_NATURAL = 1 << 64
_DIGITS = re.compile(r"[0-9]{1,20}")


def natural(text: str) -> int:
    """An integer from 0 to 2⁶⁴ - 1 as the kernel writes it; raises ``ValueError``."""
    text = text.strip()
    if not _DIGITS.fullmatch(text) or int(text) >= _MOST_NATURAL:
        raise ValueError(f"{text[:40]!r} is not an integer")
    return int(text)


def cpu_list(text: str) -> tuple[int, ...]:
    """ "0-3,8" or "0 1 2" as (0, 1, 2, 3, 8), sorted; "" is (). Raises ``ValueError``."""
    cpus: set[int] = set()
    for part in re.split(r"[,\s]+", text.strip()):
        if not part:
            continue
        first, dash, last = part.partition("-")
        low = natural(first)
        high = natural(last) if dash else low
        if not low <= high < _MOST_CPUS:
            raise ValueError(f"{part[:40]!r} is not a CPU range")
        cpus.update(range(low, high + 1))
    return tuple(sorted(cpus))


def cpu_list_text(cpus: Iterable[int]) -> str:
    """(0, 1, 2, 3, 8) as "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def natural_at(system: System, path: str) -> Fact[int]:
    """The integer ≥ 0 that a file holds."""
    return system.text(path).map(natural, "an integer")


def cpus_at(system: System, path: str) -> Fact[tuple[int, ...]]:
    """The list of CPUs that a file holds."""
    return system.text(path).map(cpu_list, "a list of CPUs")


def word_at(system: System, path: str) -> str | None:
    """The first line of a file, or ``None`` where it cannot be read or is empty."""
    text = system.text(path).value
    return text.splitlines()[0].strip() or None if text else None


def keyed_kilobytes(text: str, key: str) -> int:
    """Bytes of the line "KEY:  123 kB", as in /proc/meminfo; raises ``ValueError``."""
    found = re.search(
        rf"(?m)^(?:Node\s+\d+\s+)?{re.escape(key)}:[ \t]*([0-9]{{1,20}})[ \t]*kB", text
    )
    if found is None:
        raise ValueError(f"there is no {key}")
    return natural(found[1]) * 1024


def asked(source: str, call: Callable[[], Fact[T]]) -> Fact[T]:
    """The answer of a system call; unknown if it raises."""
    try:
        return call()
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        return cannot_tell(source, f"it failed ({error})"[:200])
