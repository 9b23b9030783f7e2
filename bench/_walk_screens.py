"""A sample screen of a page compared with what the command prints, and written from it.

Lines are compared with their spaces as one, and with the lines that they were wrapped into. Where
the machine decides (a rate, a time) figures are replaced by their kind: a size in memory, a time, a
number. In a sample a line that is only "…" stands for any lines, and "…" at the end of a line for
the rest of it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Final

GAP: Final = "…"
#: Width of the terminal whose screens the samples are.
COLUMNS: Final = 80
#: Lines of a screen that is shown whole.
WHOLE: Final = 25

_NUMBER: Final = r"[-+]?(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:[kM](?!\w)|\+)?"
#: Always masked: versions, the time that this run needed, numbers of processes.
_VOLATILE: Final = (
    (r"torch \d[\w.+]*", "torch VERSION"),
    (r"trainfit \d[\w.+]*", "trainfit VERSION"),
    (r", \d+(?:\.\d+)? (?:s|min)\)", ", TIME)"),
    (r"good \(\d[\d.]* \w+\)", "good (TIME)"),
    (r"\d{8}-\d{6}\S*", "DATE"),
)
_KINDS: Final = (
    (rf"{_NUMBER} ?(?:B|KiB|MiB|GiB|TiB|KB|MB|GB)\b", "SIZE"),
    (rf"(?:{_NUMBER} ?(?:ns|µs|ms|s|min|h)\b ?)+", "TIME "),
    (r"[▁▂▃▄▅▆▇█]+", "BAR"),
    (_NUMBER, "N"),
)


def plain(line: str) -> str:
    """The line with spaces as one, and without what differs from run to run."""
    for pattern, word in _VOLATILE:
        line = re.sub(pattern, word, line)
    return " ".join(line.split())


def masked(line: str) -> str:
    """The line with figures replaced by their kind."""
    line = plain(line)
    for pattern, word in _KINDS:
        line = re.sub(pattern, word, line)
    return " ".join(line.split())


def different(sample: Sequence[str], printed: Sequence[str], measured: bool) -> list[str]:
    """Entries of the sample that are not printed in this order, none if it is a true sample.

    Without ``measured`` figures count, and only a line "…" of the sample may leave lines out.
    """
    form = masked if measured else plain
    forms = [form(_text(entry)) for entry in _entries(printed)]
    place, free, missing = 0, True, []
    for entry in _entries(sample):
        if entry[0].strip() == GAP:
            free = True
            continue
        start = _after(form(_text(entry)), forms, place, free=free or measured)
        if start is None:
            missing.append(_text(entry))
            free = True
        else:
            place, free = start + 1, False
    if place < len(forms) and not (free or measured):
        missing.append(f"(printed, and not in the sample:) {forms[place]}")
    return missing


def rewritten(sample: Sequence[str], printed: Sequence[str]) -> list[str]:
    """The sample with what is printed today, as much abridged as it was.

    A sample without "…" is the whole screen, of :data:`WHOLE` lines at most. Of an abridged one
    each line is replaced by the printed entry of the same form, or of nearly the same words; a line
    that is printed no more is left out. If none of them is printed, it is the whole screen.
    """
    lines = _trimmed(printed)
    entries = _entries(lines)
    abridged = any(line.strip() == GAP for line in sample)
    kept = _chosen(sample, entries) if abridged else []
    if kept:
        return _with_gaps(kept, entries, lines)
    return lines if len(lines) <= WHOLE else [*lines[:WHOLE], GAP]


def _entries(lines: Sequence[str]) -> list[list[str]]:
    """The lines without empty ones, those that one long line was wrapped into together.

    A line goes on if the next one is further in, and its first word had no room.
    """
    entries: list[list[str]] = []
    last = ""
    for line in lines:
        if not line.strip():
            last = ""
            continue
        room = len(last) + 1 + len(line.split()[0])
        if last and room > COLUMNS and _indent(line) > _indent(entries[-1][0]):
            entries[-1].append(line)
        else:
            entries.append([line])
        last = line.rstrip()
    return entries


def _text(entry: Sequence[str]) -> str:
    return " ".join(line.strip() for line in entry)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _after(form: str, forms: Sequence[str], place: int, *, free: bool) -> int | None:
    """Where this form stands at or after ``place``; right there if not ``free``."""
    stop = len(forms) if free else place + 1
    cut = form.removesuffix(GAP).strip() if form.endswith(GAP) else None
    for number, there in enumerate(forms[place:stop], place):
        if there == form or (cut and there.startswith(cut)):
            return number
    return None


def _chosen(sample: Sequence[str], entries: Sequence[list[str]]) -> list[int]:
    """Numbers of the entries that the sample's lines are of; a sample may be wrapped otherwise."""
    forms = [masked(_text(entry)) for entry in entries]
    kept: list[int] = []
    place = 0
    for line in sample:
        form = masked(line)
        if not form or form == GAP:
            continue
        found = _after(form, forms, place, free=True)
        if found is None:
            found = _alike(form, forms, place)
        if found is not None and (not kept or found != kept[-1]):
            kept.append(found)
        place = found if found is not None else place
    return kept


def _alike(form: str, forms: Sequence[str], place: int) -> int | None:
    if len(form) < len("Fits: SIZE"):
        return None
    for number, there in enumerate(forms[place:], place):
        if form in there:
            return number
    starts = [there[: len(form)] for there in forms[place:]]
    near = difflib.get_close_matches(form, starts, n=1, cutoff=0.75)
    return place + starts.index(near[0]) if near else None


def _with_gaps(
    kept: Sequence[int], entries: Sequence[list[str]], lines: Sequence[str]
) -> list[str]:
    written: list[str] = []
    before = -1
    for number in kept:
        entry = entries[number]
        if number > before + 1:
            written.append(" " * _indent(entry[0]) + GAP)
        elif written and not lines[lines.index(entry[0]) - 1].strip():
            written.append("")
        written += entry
        before = number
    return written if before == len(entries) - 1 else [*written, GAP]


def _trimmed(lines: Sequence[str]) -> list[str]:
    found = [line.rstrip() for line in lines]
    while found and not found[0]:
        del found[0]
    while found and not found[-1]:
        del found[-1]
    return found
