"""Makes user text printable, wraps and shortens it."""

from __future__ import annotations

import textwrap
from typing import Final

#: Columns of a report; nothing that could be broken is wider.
WIDTH: Final = 100


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


def short(text: str, most: int = 160) -> str:
    """The first line that says something, printable, its end cut off where it is long."""
    line = printable(next((line.strip() for line in text.splitlines() if line.strip()), ""))
    return line if len(line) <= most else line[: most - 1] + "…"


def one_line(text: str, most: int = 300) -> str:
    """Text on one line, its end kept: of a traceback that says the most."""
    line = " ".join(text.split())
    return line if len(line) <= most else "…" + line[1 - most :]


def _escape(code: int) -> str:
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
