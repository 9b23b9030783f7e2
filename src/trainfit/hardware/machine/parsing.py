"""Small texts, values and calls of a machine, read so that what is wrong with them does no harm."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from trainfit.hardware.machine.system import System
from trainfit.results.machine import Fact, cannot_tell

T = TypeVar("T")

#: Linux has at most 8192 CPUs (x86's NR_CPUS); what counts further is no list of CPUs.
_MOST_CPUS = 1 << 14
#: The kernel's, NVML's and CUDA's numbers have at most 64 bits.
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
    match = re.search(
        rf"(?m)^(?:Node\s+\d+\s+)?{re.escape(key)}:[ \t]*([0-9]{{1,20}})[ \t]*kB", text
    )
    if match is None:
        raise ValueError(f"there is no {key}")
    return natural(match[1]) * 1024


def asked(source: str, call: Callable[[], Fact[T]]) -> Fact[T]:
    """The answer of a system call; unknown if it raises."""
    try:
        return call()
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        return cannot_tell(source, f"it failed ({error})"[:200])


# ---
# Validated values from probes and files: the expected type or ``None``.
#
# Readers get JSON from other processes and from recorded machines; nothing in it is trusted.


_LONGEST_TEXT = 4000


def whole(value: Any) -> int | None:
    """An integer of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _MOST_NATURAL else None


def number(value: Any) -> float | None:
    """A finite number from 0 on."""
    if isinstance(value, float):
        return value if 0 <= value < _MOST_NATURAL else None  # NaN is neither
    found = whole(value)
    return None if found is None else float(found)


def text(value: Any) -> str | None:
    """A text, perhaps empty, cut where it is absurdly long; its lone surrogates are replaced."""
    if not isinstance(value, str):
        return None
    return value[:_LONGEST_TEXT].encode("utf-8", "replace").decode()


def word(value: Any) -> str | None:
    """A text with something in it."""
    found = text(value)
    return found.strip() or None if found is not None else None


def path(value: Any) -> str | None:
    """An absolute path that the system can be asked for."""
    found = word(value)
    return found if found and found[0] == "/" and "\0" not in found else None


def flag(value: Any) -> bool | None:
    """JSON's true and false, or C's 1 and 0."""
    return bool(value) if isinstance(value, int) and value in (0, 1) else None


def pair(value: Any) -> tuple[int, int] | None:
    """Two whole numbers, as a compute capability has."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    major, minor = whole(value[0]), whole(value[1])
    return None if major is None or minor is None else (major, minor)


def each(value: Any, read: Callable[[Any], T | None]) -> tuple[T, ...] | None:
    """What ``read`` makes of a list's items, without those that are not what they should be."""
    if not isinstance(value, list | tuple):
        return None
    return tuple(found for found in map(read, value) if found is not None)


def cuda_version(value: Any) -> tuple[int, int] | None:
    """(12, 4) of 12040, as NVML and libcuda write CUDA's versions."""
    found = whole(value)
    return divmod(found // 10, 100) if found else None


def error_of(value: Any) -> str | None:
    """The text of ``{"error": text}``."""
    return word(value.get("error")) if isinstance(value, Mapping) else None


def shown(value: Any) -> str:
    """A value in a few words, for a reason."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _MOST_NATURAL:
        return "a very large number"
    words = repr(value)
    return words if len(words) <= 60 else words[:60] + "…"


# ---
# Calls that may hang, each in a daemon thread.


def begin(call: Callable[..., T], *words: Any) -> Future[T]:
    """Call it in a thread of its own.

    A daemon, unlike an executor's: where even the start of a command hangs (a dead network
    mount), it keeps neither the reader nor the program from ending.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call(*words))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=f"trainfit {call.__name__}", daemon=True).start()
    return answer
