"""Validated values from probes and files: the expected type or ``None``.

Readers get JSON from other processes and from recorded machines; nothing in it is trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_LONGEST_TEXT = 4000
#: All of NVML's and CUDA's numbers have at most 64 bits.
_BOUND = 1 << 64


def whole(value: Any) -> int | None:
    """An integer of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _BOUND else None


def number(value: Any) -> float | None:
    """A finite number from 0 on."""
    if isinstance(value, float):
        return value if 0 <= value < _BOUND else None  # NaN is neither
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
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _BOUND:
        return "a very large number"
    words = repr(value)
    return words if len(words) <= 60 else words[:60] + "…"
