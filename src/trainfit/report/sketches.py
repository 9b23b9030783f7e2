"""Pictures in characters, for a terminal: bars, and values over time in a line of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

from trainfit.report.layout import clipped, table

#: Lines of a picture for so many columns.
Sketch = Callable[[int], Sequence[str]]

EIGHTHS: Final = "▁▂▃▄▅▆▇█"
_PARTS: Final = " ▏▎▍▌▋▊▉█"
#: Columns of the longest bar at most, and at least.
_BAR: Final = (26, 1)


def bars(
    rows: Sequence[tuple[Sequence[str], float, str]],
    kinds: str,
    head: Sequence[str] = (),
    what: Sequence[str] = ("",),
    *,
    title: str = "",
) -> Sketch:
    """A bar for each row: its cells, its length, and what stands behind it.

    ``kinds`` are of the columns of cells, as those of :func:`trainfit.report.layout.table`;
    ``head`` has their titles, and ``what`` says what the bars are, in shorter and shorter words.
    """

    def drawn(columns: int) -> list[str]:
        cells = [list(each[0]) for each in rows]
        lines = table(cells, kinds, head)
        left = max(map(len, lines))
        behind = max(len(text) for _, _, text in rows) + 3
        room = max(_BAR[1], min(_BAR[0], columns - left - behind))
        longest = max(length for _, length, _ in rows) or 1.0
        found = [title] if title else []
        if head:
            first = f"{lines.pop(0):<{left}}  "
            said = next((each for each in what if len(first + each) <= columns), "")
            found.append((first + said).rstrip())
        for line, (_, length, text) in zip(lines, rows, strict=True):
            bar = _bar(length / longest, room)
            found.append(clipped(f"{line:<{left}}  {bar} {text}".rstrip(), columns))
        return found

    return drawn


def _bar(share: float, width: int) -> str:
    eighths = max(1 if share > 0 else 0, round(8 * width * max(0.0, min(1.0, share))))
    bar = "█" * (eighths // 8) + (_PARTS[eighths % 8] if eighths % 8 else "")
    return bar.ljust(width)


def blocks(values: Sequence[float | None], low: float = 0.0, high: float = 1.0) -> str:
    """A character for each value between ``low`` and ``high``; a blank where there is none."""
    span = (high - low) or 1.0
    return "".join(
        " " if value is None else EIGHTHS[min(7, max(0, int(8 * (value - low) / span)))]
        for value in values
    )


def parts(number: int, most: int) -> list[tuple[int, int]]:
    """So many values in ``most`` parts of about the same length: where each begins and ends."""
    cells = min(most, number)
    edges = [round(place * number / cells) for place in range(cells + 1)]
    return [(one, other) for one, other in itertools.pairwise(edges) if other > one]
