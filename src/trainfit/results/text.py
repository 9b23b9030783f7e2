"""Text: sizes, times, rates and counts in one way; user text printable, wrapped, shortened.
And the words of a command as one line for bash, and back.
"""

from __future__ import annotations

import codecs
import contextlib
import contextvars
import math
import os
import re
import shlex
import signal
import textwrap
from collections.abc import Iterable, Iterator
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


def dtype_name(dtype: object) -> str:
    """``bfloat16`` of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def short(text: str, most: int = 160) -> str:
    """The first line that says something, printable, its end cut off where it is long."""
    line = printable(next((line.strip() for line in text.splitlines() if line.strip()), ""))
    return line if len(line) <= most else line[: most - 1] + "…"


def one_line(text: str, most: int = 300) -> str:
    """Text on one line, its end kept: of a traceback that says the most."""
    line = " ".join(text.split())
    return line if len(line) <= most else "…" + line[1 - most :]


def exception_text(kind: str, message: object) -> str:
    """ "KeyError: 'x'", or the kind alone of an exception without a message."""
    said = str(message)
    return f"{kind}: {said}" if said else kind


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


# ---
# Formats figures: sizes, times, rates, shares, factors and counts.
#
# One way of writing for messages, reports and results: a unit after one space, never an exponent,
# never 1000 of a unit that has a larger one, and "-" for what was not measured.


KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
_TIB: Final = 1 << 40

NOT_MEASURED: Final = "-"
#: Seconds from which a time is written in minutes.
_MINUTES_FROM: Final = 100
_PREFIXES: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def size(nbytes: float | None, *, signed: bool = False) -> str:
    """Bytes: "5.50 GiB", "507 MiB", "1.5 MiB", "12 KiB", "100 B".

    ``signed`` is for a difference: "+1.20 GiB".
    """
    return NOT_MEASURED if nbytes is None else " ".join(size_parts(nbytes, signed=signed))


def size_parts(nbytes: float, *, signed: bool = False) -> tuple[str, str]:
    """The number and the unit of :func:`size`."""
    nbytes = round(nbytes)
    sign, amount = _sign(nbytes, signed), abs(nbytes)
    if amount < KIB:
        return f"{sign}{amount}", "B"
    for unit, name, written in _SIZES:
        text = written(amount / unit)
        if float(text) < 1024:  # 1023.6 MiB are written as 1.00 GiB
            return f"{sign}{text}", name
    return f"{sign}{amount / _TIB:.2f}", "TiB"


def size_range(low: int, high: int, between: str = "to") -> str:
    """ "4.69 to 5.54 GiB": the unit once where both have the same."""
    (first, unit), (second, other) = size_parts(low), size_parts(high)
    return f"{first}{'' if unit == other else f' {unit}'} {between} {second} {other}"


def duration(seconds: float | None) -> str:
    """A time: "25 µs", "79.1 ms", "1.2 s", "2 min 05 s", "10 min", "1 h 02 min"."""
    if seconds is None:
        return NOT_MEASURED
    if not math.isfinite(seconds):
        return str(seconds)
    sign, amount = _sign(seconds, False), abs(seconds)
    if amount < _MINUTES_FROM - 0.05:
        for scale, unit in ((1.0, "s"), (1e3, "ms")):
            if amount * scale >= 0.9995:
                return f"{sign}{_trimmed(three_digits(amount * scale))} {unit}"
        text = _trimmed(f"{amount * 1e6:.3f}" if amount < 1e-6 else three_digits(amount * 1e6))
        return f"{sign}{text} µs" if text != "0" else "0 s"
    minutes, rest = divmod(round(amount), 60)
    if minutes < 60:
        return f"{sign}{minutes} min" + (f" {rest:02d} s" if rest else "")
    hours, minutes = divmod(round(amount / 60), 60)
    return f"{sign}{hours} h" + (f" {minutes:02d} min" if minutes else "")


def rate(per_second: float | None) -> str:
    """Something a second, in three digits: "0.0500", "8.50", "101", "1234"."""
    return NOT_MEASURED if per_second is None else three_digits(per_second)


def byte_rate(bytes_per_s: float | None) -> str:
    """Bytes a second: "3.35 TB/s", "540 MB/s"."""
    return with_prefix(bytes_per_s, "B/s")


def with_prefix(value: float | None, unit: str) -> str:
    """A figure with an SI prefix, in three digits: "82.6 TFLOP/s", "12 GB/s"."""
    if value is None:
        return NOT_MEASURED
    for scale, prefix in _PREFIXES:
        # 999.6 M are written as 1 G.
        if abs(value) >= 0.9995 * scale:
            return f"{_trimmed(three_digits(value / scale))} {prefix}{unit}"
    return f"{_trimmed(three_digits(value))} {unit}"


def percent(share: float | None, *, decimals: int = 0, signed: bool = False) -> str:
    """A share in whole percent; below 1% with a decimal: "46%", "0.4%", "<0.1%".

    ``decimals`` at most, for figures that are told apart by them: "9.6%", "10%".
    ``signed`` is for a change: "+3%", "±0%".
    """
    if share is None:
        return NOT_MEASURED
    value = abs(100 * share)
    sign = _sign(share, signed)
    if decimals:
        return f"{sign}{_trimmed(f'{value:.{decimals}f}')}%"
    if value >= 0.95:
        return f"{sign}{value:.0f}%"
    if value >= 0.05:
        return f"{sign}{value:.1f}%"
    if signed:
        return "±0%"
    return ("<0.1%" if share > 0 else ">-0.1%") if share else "0%"


def share(part: float, whole: float) -> str:
    """A part of a whole in percent; empty where the whole is nothing."""
    return percent(part / whole) if whole else ""


def times(factor: float | None) -> str:
    """A factor: "0.95×", "1.42×", "12.3×"."""
    if factor is None:
        return NOT_MEASURED
    return f"{factor:.2f}×" if 0.1 <= abs(factor) < 1 else f"{three_digits(factor)}×"


def count(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: "1 step", "2 passes"; ``plural`` is one that is made otherwise."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + ending}"


def signal_name(number: int) -> str:
    """ "SIGKILL"; "signal 99" of one without a name here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def cores(number: float) -> str:
    """A number of cores, that a quota may make fractional: "2", "1.5"."""
    return _trimmed(f"{number:.2f}")


def core_count(number: float) -> str:
    """A number of cores with its noun: "1 core", "1.5 cores"."""
    said = cores(number)
    return f"{said} core{'' if said == '1' else 's'}"


def ghz(hertz: float | None) -> str:
    """A clock: "3 GHz", "2.45 GHz"."""
    return NOT_MEASURED if hertz is None else f"{_trimmed(f'{hertz / 1e9:.2f}')} GHz"


def three_digits(value: float) -> str:
    """Three significant digits, and all digits before the point: "0.0500", "8.50", "1234"."""
    if not value or not math.isfinite(value):
        return "0" if not value else str(value)
    exponent = int(f"{value:.2e}".partition("e")[2])
    return f"{value:.{max(0, 2 - exponent)}f}"


def _whole(value: float) -> str:
    """Whole from 10 on; below with the decimal that is not 0."""
    return _trimmed(f"{value:.1f}") if value < 9.95 else f"{value:.0f}"


_SIZES: Final = ((KIB, "KiB", _whole), (MIB, "MiB", _whole), (GIB, "GiB", "{:.2f}".format))


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def _sign(value: float, signed: bool) -> str:
    if value < 0:
        return "-"
    return "+" if signed and value > 0 else ""


#: The beginning of a word that sets a variable before a program.
ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
#: A word of a bash command line, quotes and all, as :func:`quote` writes them.
_LINE_WORD: Final = re.compile(
    r"""(?:\$'(?:\\.|[^'\\])*'|'[^']*'|"[^"]*"|\\.|[^\s'"\\])+""",
)
_ANSI_C: Final = re.compile(r"\$'((?:\\.|[^'\\])*)'")


def line_of(words: Iterable[str]) -> str:
    """The words as one line; assignments before a program stay readable."""
    return " ".join(map(quote, words))


def words_of(line: str) -> list[str]:
    """The reverse of :func:`line_of`."""
    return [_unquote(word) for word in quoted_words(line)]


def quoted_words(line: str) -> list[str]:
    """The words of a bash command line, as they are written."""
    return _LINE_WORD.findall(line)


def quote(word: str) -> str:
    """One word of a bash command, printable; an assignment's name stays readable."""
    match = ASSIGNMENT.match(word)
    if match and word[match.end() :]:
        return match.group(0) + quote(word[match.end() :])
    if match or word.isprintable():
        return word if match else shlex.quote(word)
    return "$'" + "".join(_ansi_c(letter) for letter in word) + "'"


def _ansi_c(letter: str) -> str:
    if letter in "\\'":
        return "\\" + letter
    if letter.isprintable():
        return letter
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(letter))


def _unquote(word: str) -> str:
    name = re.match(r"[A-Za-z_][A-Za-z0-9_]*=(?=\$')", word)
    start, rest = (name.group(0), word[name.end() :]) if name else ("", word)
    match = _ANSI_C.fullmatch(rest)
    if match is None:
        return "".join(shlex.split(word))
    escaped = re.split(r"((?:\\x[0-9a-f]{2})+|\\.)", match[1])
    return start + "".join(map(_plain_ansi_c, escaped))


def _plain_ansi_c(part: str) -> str:
    if part.startswith("\\x"):
        return os.fsdecode(bytes.fromhex(part.replace("\\x", "")))
    return part[1:] if part.startswith("\\") else part
