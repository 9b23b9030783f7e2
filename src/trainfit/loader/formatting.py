"""Formatting of figures and user text in faults and their fixes."""

from __future__ import annotations

from typing import Final

_LONGEST: Final = 160


def size(nbytes: float) -> str:
    """Bytes with a unit, to three digits."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes:.0f} B"


def short(text: str, most: int = _LONGEST) -> str:
    """User text for a summary: its first line that says something, and not long."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= most else line[: most - 1] + "…"
