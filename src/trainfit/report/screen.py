"""A screen: lines with a style, in blocks of which the most dispensable give way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final, Literal

from trainfit.results.format import count
from trainfit.results.text import columns, wrapped

#: Lines of a default screen; what has no room on it is shown by ``--explain``.
LINES: Final = 25
#: Lines of a block from which it can be cut.
_CUT: Final = 3
#: Columns of the labels of facts.
LABEL: Final = 16

Style = Literal["good", "bad", "title", "plain", "quiet"]


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the screen, and how it may look on a terminal."""

    text: str
    style: Style = "plain"


@dataclasses.dataclass(frozen=True)
class ScreenBlock:
    """Lines that belong together; the greatest ``rank`` goes first where room is scarce, 0 stays.

    ``notes`` of them are notes, or findings, which are counted where they have no room.
    """

    lines: tuple[Line, ...]
    rank: int = 0
    notes: int = 0


def within(blocks: Sequence[ScreenBlock], most: int) -> list[ScreenBlock]:
    """The blocks without those that are most dispensable, until there are at most so many lines."""
    kept = list(blocks)
    while sum(len(block.lines) for block in kept) > most:
        rank = max(block.rank for block in kept)
        if not rank:
            break
        last = max(at for at, block in enumerate(kept) if block.rank == rank)
        del kept[last]
    return kept


def screen(blocks: Iterable[ScreenBlock], more: str, noun: str = "note") -> list[Line]:
    """At most :data:`LINES` lines; the last says that ``--explain`` shows ``more``, and how many
    notes, or what else the blocks count, had no room.

    A block that may not go is cut where even those have no room: in an exceptionally long text.
    """
    given = [block for block in blocks if block.lines]
    kept = within(given, LINES - 1)
    hidden = sum(block.notes for block in given) - sum(block.notes for block in kept)
    left = LINES - 1 - sum(len(block.lines) for block in kept)
    while left < 0:
        longest = max(range(len(kept)), key=lambda at: len(kept[at].lines))
        lines = kept[longest].lines
        if len(lines) < _CUT:
            del kept[-1]
            left = LINES - 1 - sum(len(block.lines) for block in kept)
            continue
        cut = Line(cut_short(lines[-3].text), lines[-3].style)
        kept[longest] = dataclasses.replace(kept[longest], lines=(*lines[:-3], cut))
        left += 2
    # A blank line at an end, or next to another, is left over from a block that is gone.
    shown: list[Line] = []
    for line in [line for block in kept for line in block.lines]:
        if line.text or (shown and shown[-1].text):
            shown.append(line)
    while shown and not shown[-1].text:
        shown.pop()
    said = f"{count(hidden, f'more {noun}')}, {more}" if hidden else more
    return [*shown, Line(_more(f"{said[0].upper()}{said[1:]}"), "quiet")]


def _more(said: str) -> str:
    """The last line; of a list that has no room the first are named."""
    line, end = f"{said}: --explain", ""
    while len(line) > columns() and "," in said:
        said, end = said.rpartition(",")[0], ", …"
        line = f"{said}{end}: --explain"
    return line


def block(
    text: str, rank: int = 0, *, style: Style = "plain", first: str = "", rest: str = "  "
) -> ScreenBlock:
    """A text in lines of the screen; an empty one has none."""
    return ScreenBlock(tuple(lines_of(wrapped(text, first, rest), style)) if text else (), rank)


def made(
    lines: str | Iterable[str], rank: int = 0, *, title: str = "", notes: int = 0
) -> ScreenBlock:
    """Lines that are laid out already, below a title; without lines there is no title, either."""
    body = lines_of("\n".join([lines] if isinstance(lines, str) else lines))
    head = [Line(title, "title")] if title and body else []
    return ScreenBlock((*head, *body), rank, notes)


def fact(label: str, text: str, rank: int = 0) -> ScreenBlock:
    """A label in a column of its own, and what is to be said; nothing without a text."""
    return block(text, rank, first=f"  {label:<{LABEL - 2}}", rest=" " * LABEL)


def note_block(text: str, rank: int, title: str = "") -> ScreenBlock:
    """A note as an item of a list, counted where it has no room."""
    return made(wrapped(text, "  - ", "    "), rank, title=title, notes=1)


def blank(rank: int = 90) -> ScreenBlock:
    """An empty line, which goes early."""
    return ScreenBlock((Line(""),), rank)


def lines_of(text: str, style: Style = "plain") -> list[Line]:
    """The lines of a text; of an empty one none."""
    return [Line(line, style) for line in text.split("\n")] if text else []


def plain_text(lines: Iterable[Line]) -> str:
    """The same without styles."""
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


def shortened(text: str, most: int, first: str = "", rest: str = "  ") -> str:
    """A text in at most so many lines; what does not fit into them ends in an ellipsis."""
    lines = wrapped(text, first, rest).split("\n")
    if len(lines) > most:
        lines = [*lines[: most - 1], cut_short(lines[most - 1])]
    return "\n".join(lines)
