"""The layout of text: lines with a style, commands, and tables."""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainfit.results.text import columns, printable, quoted_words, wrapped

#: Lines of a default screen; what has no room on it is shown by ``--explain``.
LINES: Final = 25

Style = Literal["good", "bad", "title", "plain", "quiet"]


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the screen, and how it may look on a terminal."""

    text: str
    style: Style = "plain"


def lines_of(text: str, style: Style = "plain") -> list[Line]:
    """The lines of a text; of an empty one none."""
    return [Line(line, style) for line in text.split("\n")] if text else []


def plain_text(lines: Iterable[Line]) -> str:
    """The lines without styles."""
    return "\n".join(line.text for line in lines)


def clipped(line: str, width: int | None = None) -> str:
    """A line that ends in an ellipsis where it is too long."""
    most = width or columns()
    return line if len(line) <= most else f"{line[: most - 1].rstrip()}…"


def cut_short(line: str, width: int | None = None) -> str:
    """A line whose text goes on, with an ellipsis behind whole words: no path is cut."""
    most = width or columns()
    while len(line) + 2 > most and " " in line.strip():
        line = line.rstrip().rpartition(" ")[0].rstrip()
    return f"{line} …"


# ---
# Commands: broken between options.


def command_lines(command: str, indent: int = 2, width: int | None = None) -> str:
    """A bash command, indented and broken between options: bash reads it as one line."""
    most = width or columns()
    lines: list[str] = []
    for group in _option_groups(quoted_words(command)):
        if lines and len(lines[-1]) + 1 + len(group) <= most - 2:
            lines[-1] += " " + group
        else:
            lines.append(" " * (indent + 2 if lines else indent) + group)
    return " \\\n".join(printable(line) for line in lines)


def _option_groups(words: Sequence[str]) -> list[str]:
    """An option and its values stay together."""
    groups: list[str] = []
    previous_is_option = False
    for word in words:
        is_option = word.startswith("-")
        if previous_is_option and not is_option and "=" not in groups[-1]:
            groups[-1] += " " + word
        else:
            groups.append(word)
        previous_is_option = is_option
    return groups


# ---
# Tables as text, laid out by rich: no cell is cut, no two run together.


#: Blanks between columns, fewer where the screen is narrow; and the columns that a cell is never
#: wrapped to less of.
_GAPS: Final = (2, 1)
_NARROW: Final = 12
#: Lines of a wrapped cell from which on the rows are read more easily as a list.
_TALL: Final = 8
#: A table of so many columns is never made two.
_SPLIT: Final = 4

#: In a column of its own, which is cut off again: where a row begins.
_FIRST: Final = "."

Rows = Sequence[Sequence[str]]


def table(
    rows: Rows,
    kinds: str,
    head: Sequence[str] = (),
    *,
    indent: str = "  ",
    spare: Sequence[str] = (),
) -> list[str]:
    """Lines of a table as wide as the screen.

    ``kinds`` has a letter for each column: ``l`` left and ``r`` right, both on one line, ``w``
    wrapped to the room that the others leave, ``v`` likewise and at most 24 columns. Where the
    screen is too narrow, the columns ``spare`` are left out in that order; then left ones are
    wrapped; then the table becomes two, one below the other; then a list, a line for each cell.
    """
    rows, kinds, head = _spared(rows, kinds, head, indent, spare)
    if not _fits(rows, kinds.replace("l", "w"), head, indent) and len(kinds) > _SPLIT:
        middle = (len(kinds) + 1) // 2
        halves = [range(middle), (0, *range(middle, len(kinds)))]
        return [
            line
            for half in halves
            for line in table(
                [[row[at] for at in half] for row in rows],
                "".join(kinds[at] for at in half),
                [head[at] for at in half] if head else (),
                indent=indent,
            )
        ]
    return [line for row in table_rows(rows, kinds, head, indent=indent) for line in row]


def table_rows(
    rows: Rows,
    kinds: str,
    head: Sequence[str],
    *,
    indent: str = "  ",
    spare: Sequence[str] = (),
) -> list[list[str]]:
    """The lines of each row of a table, the head's first; rows of two tables never share a line."""
    if not rows:
        return []
    rows, kinds, head = _spared(rows, kinds, head, indent, spare)
    room = columns() - len(indent)
    for wrapping in (kinds, kinds.replace("l", "w")):
        least = _least(rows, wrapping, head)
        gap = next((gap for gap in _GAPS if least + gap * (len(kinds) - 1) <= room), None)
        if gap is not None:
            if _is_tall(rows, wrapping, head, room - gap * (len(kinds) - 1)):
                return _list(rows, head, indent)
            kinds = wrapping
            break
    else:
        return _list(rows, head, indent)
    drawn = Table(box=None, show_header=bool(head), pad_edge=False, padding=(0, gap, 0, 0))
    drawn.add_column(Text(_FIRST))
    for index, kind in enumerate(kinds):
        drawn.add_column(
            Text(head[index] if head else ""),
            justify="right" if kind == "r" else "left",
            no_wrap=kind in "lr",
            overflow="fold",
            max_width=24 if kind == "v" else None,
        )
    for row in rows:
        drawn.add_row(Text(_FIRST), *map(Text, row))
    # Of the screen only its width matters: styles, if any, are given to whole lines.
    console = Console(
        file=io.StringIO(),
        width=room + 1 + gap,
        color_system=None,
        force_terminal=False,
        _environ={},
    )
    with console.capture() as capture:
        console.print(drawn)
    found: list[list[str]] = [[]] if head else []
    in_head = bool(head)
    for line in capture.get().rstrip("\n").split("\n"):
        if line.startswith(_FIRST) and not in_head:
            found.append([])
        found[-1].append(f"{indent}{line[1 + gap :]}".rstrip())
        in_head = in_head and not line.startswith(_FIRST)  # rich aligns a head at its last line
    return found


def _fits(rows: Rows, kinds: str, head: Sequence[str], indent: str) -> bool:
    if not rows:
        return True
    least = _least(rows, kinds, head) + _GAPS[-1] * (len(kinds) - 1)
    return least <= columns() - len(indent)


def _spared(
    rows: Rows, kinds: str, head: Sequence[str], indent: str, spare: Sequence[str]
) -> tuple[Rows, str, Sequence[str]]:
    """The rows without as many of these columns as have no room, in their order."""
    for title in spare:
        if title in head and not _fits(rows, kinds, head, indent):
            index = list(head).index(title)
            rows, head = [_without(row, index) for row in rows], _without(head, index)
            kinds = kinds[:index] + kinds[index + 1 :]
    return rows, kinds, head


def _without(cells: Sequence[str], at: int) -> list[str]:
    return [cell for number, cell in enumerate(cells) if number != at]


def _least(rows: Rows, kinds: str, head: Sequence[str]) -> int:
    """Columns below which cells would have to be cut, without those between them."""
    total = 0
    for index, kind in enumerate(kinds):
        cells = [row[index] for row in rows] + ([head[index]] if head else [])
        widest = max(cell_len(line) for cell in cells for line in cell.split("\n"))
        total += widest if kind in "lr" else min(widest, _NARROW)
    return total


def _is_tall(rows: Rows, kinds: str, head: Sequence[str], room: int) -> bool:
    """Would a wrapped cell have so many lines that its row could not be read? ``room`` is what all
    columns have together, which the wrapped ones share by the length of their texts."""
    wrapped_at = [index for index, kind in enumerate(kinds) if kind == "w"]
    fixed = "".join(kind for kind in kinds if kind != "w")
    kept = [index for index, kind in enumerate(kinds) if kind != "w"]
    if not wrapped_at:
        return False
    others = [[row[index] for index in kept] for row in rows]
    titles = [head[index] for index in kept] if head else ()
    left = room - (_least(others, fixed, titles) if kept else 0)
    longest = sum(max(cell_len(row[index]) for row in rows) for index in wrapped_at)
    return longest > _TALL * max(1, left)


def _list(rows: Rows, head: Sequence[str], indent: str) -> list[list[str]]:
    rest = indent + "  "
    found = []
    for first, *others in rows:
        lines = [wrapped(first or "-", indent, rest)]
        for index, cell in enumerate(others, 1):
            if cell:
                text = f"{head[index]}: {cell}" if head and head[index] else cell
                lines.append(wrapped(text, rest, rest + "  "))
        found.append("\n".join(lines).split("\n"))
    return found


# ---
# Pictures in characters, for a terminal: bars, and values over time in a line of blocks.


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
        cells = [list(row[0]) for row in rows]
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
