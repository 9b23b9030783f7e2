"""What a page consists of: a headline for each result, and sections of text, tables and charts.

Texts are as results have them. Who writes them into a document escapes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trainfit.results.plan import JobDetail

Tone = Literal["good", "bad", "warn", "plain"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A result that the page is of, and the file that it is from. ``detail`` is what the recordings
    in it say (``None``: it has none)."""

    name: str
    result: Any
    detail: JobDetail | None = None


@dataclasses.dataclass(frozen=True)
class Command:
    """Something to type or to write, with a button that copies it; ``label`` says what it is."""

    text: str
    label: str = ""


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    tone: Tone = "plain"


@dataclasses.dataclass(frozen=True)
class Output:
    """Text in columns, as a terminal shows it."""

    text: str


@dataclasses.dataclass(frozen=True)
class Facts:
    """Labels, each with a text."""

    rows: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells; ``numeric`` are the places of columns of numbers, ``marked`` those of rows to
    set off. ``caption`` says what it shows."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    numeric: frozenset[int] = frozenset()
    marked: frozenset[int] = frozenset()
    folded: bool = False
    """Shown only when it is opened."""


@dataclasses.dataclass(frozen=True)
class Chart:
    """A Vega-Lite or Vega specification, and the same in words.

    ``title`` says what is drawn, ``says`` in a sentence what there is to see, ``note`` what was
    left out of it. ``table`` has its figures, for who does not see it.
    """

    title: str
    says: str
    spec: Mapping[str, Any]
    table: Table
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Item:
    """One of several findings: a title, a word in front of it, and labelled lines."""

    title: str
    tone: Tone = "plain"
    tag: str = ""
    rows: tuple[tuple[str, str], ...] = ()
    commands: tuple[Command, ...] = ()


@dataclasses.dataclass(frozen=True)
class Items:
    """Findings, the most important first."""

    items: tuple[Item, ...]


Block = Command | Text | Output | Facts | Table | Chart | Items


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
    commands: tuple[Command, ...] = ()
    changes: tuple[str, ...] = ()
    tiles: tuple[Tile, ...] = ()


@dataclasses.dataclass(frozen=True)
class Subject:
    """All that a page says of one result."""

    headline: Headline
    sections: tuple[Section, ...]


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


def facts(*rows: tuple[str, str]) -> Facts | None:
    """Those with a text; ``None`` without any."""
    there = tuple(row for row in rows if row[1])
    return Facts(there) if there else None


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str = "",
    numeric: Sequence[int] = (),
    marked: Sequence[int] = (),
    *,
    folded: bool = False,
) -> Table | None:
    """``None`` without a row."""
    return figures(columns, rows, caption, numeric, marked, folded=folded) if rows else None


def figures(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str = "",
    numeric: Sequence[int] = (),
    marked: Sequence[int] = (),
    *,
    folded: bool = False,
) -> Table:
    """The table of what a chart draws, which has rows."""
    cells = tuple(map(tuple, rows))
    return Table(tuple(columns), cells, caption, frozenset(numeric), frozenset(marked), folded)
