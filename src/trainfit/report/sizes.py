"""Formats sizes, times, rates and user text."""

from __future__ import annotations

import textwrap

GIB = 1 << 30
MIB = 1 << 20

#: Columns of a report; nothing that could be broken is wider.
WIDTH = 100


def size(nbytes: int) -> str:
    """Bytes with a unit: two decimals from 1 GiB on, whole MiB, KiB or bytes below."""
    if abs(nbytes) >= GIB:
        return f"{nbytes / GIB:.2f} GiB"
    if abs(nbytes) >= MIB:
        return f"{nbytes / MIB:.0f} MiB"
    return f"{nbytes / 1024:.0f} KiB" if abs(nbytes) >= 1024 else f"{nbytes} B"


def share(part: int, whole: int) -> str:
    """A part of a whole in percent; empty where the whole is nothing."""
    return f"{100 * part / whole:.0f}%" if whole else ""


def rate_text(value: float) -> str:
    """Something a second: three digits, no decimals from 100 on."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def time_text(seconds: float) -> str:
    """A time with a unit: three digits below 100 s, minutes or hours from there on."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def printable(text: str, *, lines: bool = False) -> str:
    """User text with control characters made visible, so that terminal escapes do nothing.

    Newlines stay only with ``lines``; tabs become spaces then.
    """
    if lines:
        return "\n".join(printable(line.expandtabs()) for line in text.split("\n"))
    return "".join(c if c.isprintable() else _escape(ord(c)) for c in text)


def wrapped(text: str, first: str, rest: str, width: int = WIDTH) -> str:
    """Text in lines of ``width``, after ``first`` in the first and ``rest`` in the others."""
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _escape(code: int) -> str:
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
