"""A sample screen of a page compared with what the command prints, and written from it.

Lines are compared with their spaces as one. Where the machine decides (a rate, a time) figures are
replaced by their kind: a size in memory, a time, a number. In a sample a line that is only "…"
stands for any lines, and "…" at the end of a line for the rest of it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Final

GAP: Final = "…"
#: Lines of a screen that is shown whole.
WHOLE: Final = 25

_NUMBER: Final = r"[-+]?(?<![\w.])\d[\d,]*(?:\.\d+)?(?:k|M|\+)?"
#: Always masked: versions, the time that this run needed, numbers of processes.
_VOLATILE: Final = (
    (r"torch \d\S*", "torch VERSION"),
    (r"trainfit \d\S*", "trainfit VERSION"),
    (r", \d+(?:\.\d+)? (?:s|min)\)", ", TIME)"),
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
    """Lines of the sample that are not printed in this order, none if it is a true sample.

    Without ``measured`` figures count, and only a line "…" of the sample may leave lines out.
    """
    form = masked if measured else plain
    lines = [form(line) for line in printed if line.strip()]
    wanted = [line.strip() for line in sample if line.strip()]
    place, free, missing = 0, True, []
    for line in wanted:
        if line == GAP:
            free = True
            continue
        start = _after(form(line), lines, place, free=free or measured)
        if start is None:
            missing.append(line)
            free = True
        else:
            place, free = start + 1, False
    if place < len(lines) and not (free or measured):
        missing.append(f"(printed, and not in the sample:) {lines[place]}")
    return missing


def rewritten(sample: Sequence[str], printed: Sequence[str]) -> list[str]:
    """The sample with the lines that are printed today, as much abridged as it was.

    A sample without "…" is the whole screen, of :data:`WHOLE` lines at most. Of an abridged one each
    line is replaced by the printed line of the same form, or of nearly the same words; a line that
    is printed no more is left out. If none of them is printed, it is the whole screen.
    """
    lines = _trimmed(printed)
    if not any(line.strip() == GAP for line in sample):
        return lines if len(lines) <= WHOLE else [*lines[:WHOLE], GAP]
    kept = _chosen(sample, lines)
    if not kept:
        return lines if len(lines) <= WHOLE else [*lines[:WHOLE], GAP]
    return _with_gaps(kept, lines)


def _after(form: str, lines: Sequence[str], place: int, *, free: bool) -> int | None:
    """Where a line of this form stands at or after ``place``; right there if not ``free``."""
    stop = len(lines) if free else place + 1
    cut = form.removesuffix(GAP).strip() if form.endswith(GAP) else None
    for number, line in enumerate(lines[place:stop], place):
        if line == form or (cut and line.startswith(cut)):
            return number
    return None


def _chosen(sample: Sequence[str], lines: Sequence[str]) -> list[int]:
    forms = [masked(line) for line in lines]
    kept: list[int] = []
    place = 0
    for line in sample:
        if not line.strip() or line.strip() == GAP:
            continue
        form = masked(line)
        found = _after(form, forms, place, free=True)
        if found is None:
            near = difflib.get_close_matches(form, forms[place:], n=1, cutoff=0.7)
            found = place + forms[place:].index(near[0]) if near else None
        if found is not None:
            kept.append(found)
            place = found + 1
    return kept


def _with_gaps(kept: list[int], lines: Sequence[str]) -> list[str]:
    written: list[str] = []
    before = -1
    for number in kept:
        between = [line for line in lines[before + 1 : number] if line.strip()]
        indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
        if between:
            written.append(indent + GAP)
        elif number > before + 1 and written:
            written.append("")
        written.append(lines[number])
        before = number
    if any(line.strip() for line in lines[before + 1 :]):
        written.append(GAP)
    return written


def _trimmed(lines: Sequence[str]) -> list[str]:
    found = [line.rstrip() for line in lines]
    while found and not found[0]:
        del found[0]
    while found and not found[-1]:
        del found[-1]
    return found
