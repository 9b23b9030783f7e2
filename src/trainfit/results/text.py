"""Makes user text printable, wraps and shortens it."""

from __future__ import annotations

import codecs
import contextlib
import contextvars
import textwrap
from collections.abc import Iterator
from typing import Final

#: Columns of a text whose reader is not known, such as the text of a result within a page.
WIDTH: Final = 100
#: Nothing is laid out for fewer columns, nor for more: longer lines are hard to read.
NARROWEST: Final = 60
WIDEST: Final = 120

#: How characters of reports are written in an encoding that lacks them; others as their code.
_IN_ASCII: Final = {
    "×": "x",
    "÷": "/",
    "µ": "u",
    "·": ".",
    "…": "...",
    "→": "->",
    "±": "+-",
    "°": " ",
    "≥": ">=",
    "≤": "<=",
    "≈": "~",
    "–": "-",
    "—": "-",
    "■": "#",
    "Σ": "sum",
    "│": "|",
    "└": "+",
    "─": "-",
    "┬": "+",
    "├": "+",
    **dict(zip("▁▂▃▄▅▆▇█", ".:-=+*##", strict=True)),
    **dict(zip("▏▎▍▌▋▊▉", "...:::#", strict=True)),
}
#: Name of the error handler of streams that does this.
IN_ASCII: Final = "trainfit-ascii"

_columns = contextvars.ContextVar("columns", default=WIDTH)


def columns() -> int:
    """Columns of the screen that text is laid out for; nothing that could be broken is wider."""
    return _columns.get()


@contextlib.contextmanager
def laid_out_for(width: int) -> Iterator[None]:
    """Text that is made within is as wide as the screen, or :data:`WIDEST` where that is wider."""
    token = _columns.set(max(NARROWEST, min(width, WIDEST)))
    try:
        yield
    finally:
        _columns.reset(token)


def printable(text: str, *, lines: bool = False) -> str:
    """User text with control characters made visible, so that terminal escapes do nothing.

    Newlines stay only with ``lines``; tabs become spaces then.
    """
    if lines:
        return "\n".join(printable(line.expandtabs()) for line in text.split("\n"))
    return "".join(c if c.isprintable() else _escape(ord(c)) for c in text)


def wrapped(text: str, first: str, rest: str, width: int | None = None) -> str:
    """Text in lines of ``width``, after ``first`` in the first and ``rest`` in the others.

    Without a width they are as wide as the screen.
    """
    return textwrap.fill(
        text,
        width or columns(),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def instructions(text: str, first: str, rest: str) -> str:
    """What to do, of one line or several, printable: prose is wrapped, and lines that are indented
    are code, of which none is broken or loses its indentation."""
    lines = []
    for number, line in enumerate(text.split("\n")):
        start = rest if number else first
        code = line.startswith((" ", "\t"))
        said = printable(line.expandtabs())
        lines.append(start + said if code else wrapped(said, start, rest))
    return "\n".join(lines)


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


def _nearest(error: UnicodeError) -> tuple[str, int]:
    """An error handler of an encoder: what stands for the characters that it lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_IN_ASCII.get(c) or _escape(ord(c)) for c in lacking), error.end


codecs.register_error(IN_ASCII, _nearest)
