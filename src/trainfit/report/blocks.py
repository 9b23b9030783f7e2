"""What is said of a result: a headline, and sections of text, facts, tables, findings and charts.

Texts are as results have them. Who writes them into a document or on a screen escapes them.

Each block has a ``detail``: how dispensable it is. 0 is on every screen; up to 99 it is there while
there is room, the smallest the longest; :data:`WHOLE` is for ``--explain`` and the page, and
:data:`PAGE` for the page alone. The rows of a table that may go do so from its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from trainfit.results.files.contents import Note
from trainfit.results.plan import JobDetail

WHOLE: Final = 100
PAGE: Final = 200

Tone = Literal["good", "bad", "warn", "plain"]
#: By severity of a finding.
TONES: Final[Mapping[str, Tone]] = {"critical": "bad", "warning": "warn", "info": "plain"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A result that the page is of, and the file that it is from. ``detail`` is what the recordings
    in it say (``None``: it has none)."""

    name: str
    result: Any
    detail: JobDetail | None = None


@dataclasses.dataclass(frozen=True)
class Snippet:
    """Something to type or to write, with a button that copies it; ``label`` says what it is.

    A fix has its ``undo`` and its ``cost``, which are shown wherever it is.
    """

    text: str
    label: str = ""
    detail: int = WHOLE
    undo: str = ""
    cost: str = ""

    @property
    def rows(self) -> tuple[Row, ...]:
        """Its undo and its cost, as far as they are told."""
        return rows(("undo", self.undo), ("cost", self.cost))


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    tone: Tone = "plain"
    detail: int = WHOLE


@dataclasses.dataclass(frozen=True)
class Output:
    """Text whose lines stay as they are, such as a traceback; a screen has its end first."""

    text: str
    detail: int = WHOLE


class Row(NamedTuple):
    """A label with a text."""

    label: str
    text: str
    detail: int = WHOLE


@dataclasses.dataclass(frozen=True)
class Facts:
    """Labels, each with a text, which has so many ``lines`` on a screen at most; a screen counts
    those it has no room for by ``noun``, if they have one."""

    rows: tuple[Row, ...]
    lines: int = 2
    noun: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells; ``numeric`` are the places of columns of numbers, ``marked`` those of rows to
    set off. ``caption`` says what it shows. A narrow screen leaves the columns ``spare`` out, and
    counts rows it has no room for by ``noun``, if they have one."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    numeric: frozenset[int] = frozenset()
    marked: frozenset[int] = frozenset()
    folded: bool = False
    """Shown only when it is opened."""
    spare: tuple[str, ...] = ()
    noun: str = ""
    detail: int = WHOLE


@dataclasses.dataclass(frozen=True)
class Chart:
    """A Vega-Lite or Vega specification, and the same in words.

    ``title`` says what is drawn, ``says`` in a sentence what there is to see, ``note`` what was
    left out of it. ``table`` has its figures, for who does not see it; ``sketch`` draws it for so
    many columns of a terminal, which has the table where there is none.
    """

    title: str
    says: str
    spec: Mapping[str, Any]
    table: Table
    note: str = ""
    sketch: Callable[[int], Sequence[str]] | None = None
    detail: int = WHOLE


@dataclasses.dataclass(frozen=True)
class Item:
    """One of several findings: a title, a word in front of it, and labelled lines, of which a
    screen has those with less ``detail`` than :data:`WHOLE`: those of more than the item's own give
    way by themselves. Commands of the screen go before the lines, others after them."""

    title: str
    tone: Tone = "plain"
    tag: str = ""
    rows: tuple[tuple[str, str] | Row, ...] = ()
    commands: tuple[Snippet, ...] = ()
    detail: int = WHOLE
    lines: int = 2
    """Lines of a text on a screen at most."""


@dataclasses.dataclass(frozen=True)
class Items:
    """Findings, the most important first; a screen counts those it has no room for by ``noun``."""

    items: tuple[Item, ...]
    noun: str = ""


Block = Snippet | Text | Output | Facts | Table | Chart | Items


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page; ``answer`` is what it says in one line."""

    title: str
    blocks: tuple[Block, ...]
    answer: str = ""


@dataclasses.dataclass(frozen=True)
class Tile:
    """A figure that decides, in large print; ``share`` of a whole is drawn as a bar."""

    label: str
    value: str
    detail: str = ""
    share: float | None = None
    tone: Tone = "plain"


@dataclasses.dataclass(frozen=True)
class Headline:
    """The answer of one result: what it is, the answer in a sentence, what limits, what to run."""

    kind: str
    tone: Tone
    text: str
    limit: str = ""
    subject: str = ""
    commands: tuple[Snippet, ...] = ()
    changes: tuple[str, ...] = ()
    tiles: tuple[Tile, ...] = ()


@dataclasses.dataclass(frozen=True)
class Subject:
    """All that is said of one result; ``machine`` is where it was measured or planned for."""

    headline: Headline
    sections: tuple[Section, ...]
    notes: tuple[Note, ...] = ()
    machine: tuple[Row, ...] = ()


@dataclasses.dataclass(frozen=True)
class Page:
    """Headlines with the sections of several results, in the order of the page. ``sources`` are
    files with what is in each."""

    title: str
    headlines: tuple[Headline, ...]
    sections: tuple[Section, ...]
    sources: tuple[tuple[str, str], ...]
    version: str

    @property
    def charts(self) -> tuple[Chart, ...]:
        """All charts, in order."""
        return tuple(
            block
            for section in self.sections
            for block in section.blocks
            if isinstance(block, Chart)
        )


def section(title: str, *blocks: Block | None, answer: str = "") -> list[Section]:
    """A section of the blocks that there are; none without any."""
    there = tuple(block for block in blocks if block is not None)
    return [Section(title, there, answer)] if there else []


def facts(
    *rows: tuple[str, str] | tuple[str, str, int],
    detail: int = WHOLE,
    lines: int = 2,
    noun: str = "",
) -> Facts | None:
    """Facts of those lines that have a text, with a ``detail`` of their own or that of all;
    ``None`` where no line has one."""
    there = tuple(Row(row[0], row[1], row[2] if len(row) > 2 else detail) for row in rows if row[1])
    return Facts(there, lines, noun) if there else None


def rows(*given: tuple[str, str] | tuple[str, str, int]) -> tuple[Row, ...]:
    """The labelled lines of an item that have a text."""
    found = facts(*given)
    return found.rows if found is not None else ()


def items(entries: Sequence[Item], noun: str = "") -> Items | None:
    """``None`` without any."""
    return Items(tuple(entries), noun) if entries else None


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str = "",
    numeric: Sequence[int] = (),
    marked: Sequence[int] = (),
    *,
    folded: bool = False,
    spare: Sequence[str] = (),
    noun: str = "",
    detail: int = WHOLE,
) -> Table | None:
    """``None`` without a row."""
    if not rows:
        return None
    made = figures(columns, rows, caption, numeric, marked)
    return dataclasses.replace(made, folded=folded, spare=tuple(spare), noun=noun, detail=detail)


def figures(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str = "",
    numeric: Sequence[int] = (),
    marked: Sequence[int] = (),
) -> Table:
    """The table of what a chart draws, which has rows."""
    cells = tuple(map(tuple, rows))
    return Table(tuple(columns), cells, caption, frozenset(numeric), frozenset(marked))
