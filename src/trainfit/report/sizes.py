"""How figures are written for people."""

from __future__ import annotations

GIB = 1 << 30
MIB = 1 << 20


def size(nbytes: int) -> str:
    """Bytes with a unit: GiB with two decimals from 1 GiB on, else MiB."""
    if abs(nbytes) >= GIB:
        return f"{nbytes / GIB:.2f} GiB"
    return f"{nbytes / MIB:.0f} MiB"


def share(part: int, whole: int) -> str:
    """A part of a whole in percent; empty where the whole is nothing."""
    return f"{100 * part / whole:.0f}%" if whole else ""


def printable(text: str) -> str:
    """User text with control characters made visible (terminal escapes do nothing)."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
