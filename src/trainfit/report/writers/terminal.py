"""What is said of a result on a terminal: one screen, or all of it (``--explain``).

The answer comes first. On a screen of :data:`LINES` lines blocks give way by their ``detail``, and
texts have two lines at most; its last line names what had no room.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Final

from trainfit.report.blocks import (
    WHOLE,
    Block,
    Chart,
    Facts,
    Headline,
    Item,
    Items,
    Output,
    Row,
    Section,
    Snippet,
    Subject,
    Table,
    Text,
    Tone,
)
from trainfit.report.layout import (
    LINES,
    Line,
    Style,
    command_lines,
    cut_short,
    table,
    table_rows,
)
from trainfit.report.notes import note_text, short_place
from trainfit.results.files.contents import Note, Severity
from trainfit.results.text import columns, count, instructions, printable, wrapped

_STYLES: Final[dict[Tone, Style]] = {
    "good": "good",
    "bad": "bad",
    "warn": "title",
    "plain": "plain",
}
#: Lines of a text on the screen, of a command from which it is one long line (a terminal wraps it,
#: and it can be copied as well), and columns below which a screen has more lines.
_BRIEF: Final = 2
_COMMAND: Final = 5
_COLUMNS: Final = 80
#: Columns of a label; of a cell from which it is wrapped, in the first column and in others.
_LABEL: Final = (12, 24)
_CELL: Final = (40, 24)
#: By how much one of several findings, or of a table's rows, is more dispensable than the last.
_STEP: Final = 8
_ROW: Final = 3
#: How dispensable blank lines are: below the answer, the command, and between sections.
_BLANKS: Final = (60, 65, 75)
#: Rank of the first note of a severity.
_NOTES: Final[dict[Severity, int]] = {
    "changes the figures": 6,
    "may change the figures": 16,
    "information": 42,
}
_PLACE: Final = re.compile(r"(?<![\w/])(?![(\[{<'\"`])/?(?:[^\s/:]+/){2,}[^\s/:]+:\d+")
_UNIT: Final = re.compile(r"(?<=\d) (?=(?:[KMG]iB|B|ms|µs|s|h|min)\b)")
_FIXED: Final = "\u00a0"


@dataclasses.dataclass(frozen=True)
class Piece:
    """Lines of a group that give way together; of ``noun`` it is one of several, of which it may
    be a part that is not counted."""

    lines: tuple[Line, ...]
    group: int
    rank: int = 0
    noun: str = ""
    is_part: bool = False

    @property
    def is_blank(self) -> bool:
        """Does it only set others apart?"""
        return not any(line.text for line in self.lines)


def screen(subject: Subject) -> list[Line]:
    """A screen of :data:`LINES` lines at most: the answer, what to run, what decides, and what more
    there is.

    On a terminal of less than 80 columns there are as many more as it is narrower.
    """
    titles = _titles(subject)
    pieces = list(_pieces(subject, whole=False))
    maximum = LINES if columns() >= _COLUMNS else LINES * _COLUMNS // columns()
    kept = _within([piece for piece in pieces if piece.rank < WHOLE], titles, maximum - 1)
    hidden = [piece for piece in pieces if piece not in kept and not piece.is_blank]
    lines = _rendered(kept, titles)
    if not hidden:
        return lines
    return [*lines, Line(_more(hidden, kept, titles), "quiet")]


def whole(subject: Subject) -> list[Line]:
    """All of it."""
    pieces = [piece for piece in _pieces(subject, whole=True) if piece.rank <= WHOLE]
    return _rendered(pieces, _titles(subject))


# -- what gives way ------------------------------------------------------------------------------


def _titles(subject: Subject) -> list[str]:
    """The groups' titles; the answer and the command have none."""
    return ["", "", *(section.title for section in subject.sections), "Notes", "Machine"]


def _rendered(pieces: Sequence[Piece], titles: Sequence[str]) -> list[Line]:
    """The lines, each group below its title; no blank line at an end or next to another."""
    lines: list[Line] = []
    begun = set()
    for piece in pieces:
        if piece.group not in begun and not piece.is_blank:
            begun.add(piece.group)
            title = titles[piece.group]
            text = wrapped(_text(title), "", "  ")
            lines += [Line(line, "title") for line in text.split("\n")] if title else []
        if not piece.is_blank or (lines and lines[-1].text):
            lines += piece.lines
    while lines and not lines[-1].text:
        lines.pop()
    return lines


def _within(pieces: Sequence[Piece], titles: Sequence[str], limit: int) -> list[Piece]:
    """The pieces without the most dispensable ones, the last first; then texts are cut."""
    kept = list(pieces)
    while len(_rendered(kept, titles)) > limit:
        rank = max(piece.rank for piece in kept)
        if rank:
            del kept[max(index for index, piece in enumerate(kept) if piece.rank == rank)]
            continue
        longest = max(range(len(kept)), key=lambda at: len(kept[at].lines))
        lines = kept[longest].lines
        if len(lines) <= _BRIEF:
            del kept[-1]
            continue
        end = dataclasses.replace(lines[-2], text=cut_short(lines[-2].text))
        kept[longest] = dataclasses.replace(kept[longest], lines=(*lines[:-2], end))
    return kept


def _more(hidden: Sequence[Piece], kept: Sequence[Piece], titles: Sequence[str]) -> str:
    """Findings that had no room, counted, and sections of which nothing is shown."""
    counts: dict[str, int] = {}
    for piece in hidden:
        if piece.noun:
            counts[piece.noun] = counts.get(piece.noun, 0) + 1
    shown = {piece.group for piece in kept if not piece.is_blank}
    others = (piece for piece in hidden if not piece.noun and not piece.is_part)
    gone = (piece.group for piece in others if piece.group not in shown)
    absent = dict.fromkeys(titles[group].partition(" (")[0] for group in gone)
    parts = [count(number, f"more {noun}") for noun, number in counts.items()]
    parts += [_text(title[:1].lower() + title[1:] if title.split()[0][1:].islower() else title)
              for title in absent if title]  # fmt: skip
    text = ", ".join(parts or ["details"])
    line, end = f"{text}: --explain", ""
    while len(line) > columns() and "," in text:
        text, end = text.rpartition(",")[0], ", …"
        line = f"{text}{end}: --explain"
    return line[:1].upper() + line[1:]


# -- from blocks to lines ------------------------------------------------------------------------


def _pieces(subject: Subject, *, whole: bool) -> Iterator[Piece]:
    form = _Form(whole)
    yield from form.headline(subject.headline)
    group = 2
    for section in subject.sections:
        yield Piece((Line(""),), group - 1, _BLANKS[2])
        yield from form.section(section, group)
        group += 1
    yield Piece((Line(""),), group - 1, _BLANKS[2])
    for number, note in enumerate(subject.notes):
        yield from form.note(note, number, group)
    if whole and subject.machine:
        yield Piece((Line(""),), group, _BLANKS[2])
        yield from form.section(Section("", (Facts(subject.machine),)), group + 1)


def _text(text: str) -> str:
    return printable(" ".join(text.split()))


@dataclasses.dataclass
class _Form:
    """The screen's, or the ``whole``; ``width`` is that of the labels of a section."""

    whole: bool
    width: int = _LABEL[0]

    def lines(
        self, text: str, first: str, rest: str, style: Style = "plain", most: int = _BRIEF
    ) -> tuple[Line, ...]:
        """A text in lines of the terminal: on a screen few, and places without their folders."""
        if self.whole and "\n" in text:
            return tuple(Line(line, style) for line in instructions(text, first, rest).split("\n"))
        said = _text(text)
        if not self.whole:
            said = _PLACE.sub(lambda place: short_place(place[0]), said)
        said = _UNIT.sub(_FIXED, said)  # no line break between a number and its unit
        found = wrapped(said, first, rest).replace(_FIXED, " ").split("\n")
        if not self.whole and len(found) > most:
            found = [*found[: most - 1], cut_short(found[most - 1])]
        return tuple(Line(line, style) for line in found)

    def headline(self, head: Headline) -> Iterator[Piece]:
        style: Style = "title" if head.tone == "plain" else _STYLES[head.tone]
        yield Piece(self.lines(head.text, "", "  ", style, 5), 0)
        if head.limit:
            yield Piece(self.lines(head.limit, "  ", "  ", most=3), 0, 1)
        # A launch line that is the command as it was given names it.
        named = not self.whole and any(
            head.subject.startswith(snippet.text)
            or (snippet.label == "Run" and snippet.text.startswith(head.subject))
            for snippet in head.commands
        )
        if head.subject and not named:
            yield Piece(self.lines(head.subject, "  ", "    ", "quiet"), 0, 47)
        yield Piece((Line(""),), 0, _BLANKS[0])
        for command in head.commands:
            yield from self.command(command, 1, 0)
        for number, change in enumerate(head.changes):
            yield Piece(self.lines(change, "  - ", "    "), 1, number and 30 + number)
        if head.commands or head.changes:
            yield Piece((Line(""),), 1, _BLANKS[1])

    def command(self, command: Snippet, group: int, rank: int, indent: int = 2) -> Iterator[Piece]:
        """One to run is broken between its options; another stays one line, with its label, and so
        does what takes it back."""
        blanks = " " * indent
        if command.rows:
            lines = tuple(self.fix(command, indent, _label_width(command.rows)))
            yield Piece(lines, group, rank)
            return
        if command.label == "Run":
            text = command_lines(command.text, indent)
            if not self.whole and text.count("\n") >= _COMMAND:
                text = blanks + printable(command.text)
        else:
            label = f"{command.label[:1].lower()}{command.label[1:]}: " if command.label else ""
            text = f"{blanks}{printable(label + command.text)}"
        yield Piece(tuple(map(Line, text.split("\n"))), group, rank)

    def section(self, section: Section, group: int) -> Iterator[Piece]:
        if section.answer:
            yield Piece(self.lines(section.answer, "  ", "  "), group, WHOLE)
        rows = [row for block in section.blocks if isinstance(block, Facts) for row in block.rows]
        self.width = _label_width([row for row in rows if self.whole or row.detail < WHOLE])
        for block in section.blocks:
            yield from self.block(block, group)

    def note(self, note: Note, number: int, group: int) -> Iterator[Piece]:
        lines = self.lines(note_text(note, short=not self.whole), "  - ", "    ")
        yield Piece(lines, group, _NOTES[note.severity] + 10 * number, "note")

    @functools.singledispatchmethod
    def block(self, block: Block, group: int) -> Iterator[Piece]:
        raise TypeError(type(block).__name__)

    @block.register
    def _command(self, block: Snippet, group: int) -> Iterator[Piece]:
        yield from self.command(block, group, block.detail)

    @block.register
    def _paragraph(self, block: Text, group: int) -> Iterator[Piece]:
        lines = self.lines(block.text, "  ", "  ", _STYLES[block.tone], 3)
        yield Piece(lines, group, block.detail)

    @block.register
    def _output(self, block: Output, group: int) -> Iterator[Piece]:
        lines = printable(block.text.rstrip(), lines=True).split("\n")
        for number, line in enumerate(lines):
            rank = block.detail and block.detail + len(lines) - number
            yield Piece((Line(f"  {line}"),), group, min(rank, max(block.detail, WHOLE - 1)))

    @block.register
    def _facts(self, block: Facts, group: int) -> Iterator[Piece]:
        for row in block.rows:
            lines = self.fact(row, 2, self.width, block.lines)
            yield Piece(lines, group, row.detail, block.noun)

    def fact(self, row: Row, indent: int, width: int, most: int = _BRIEF) -> tuple[Line, ...]:
        first = f"{' ' * indent}{_text(row.label):<{width}}"
        if row.label and not first.endswith(" "):
            first += "  "
        return self.lines(row.text, first, " " * (indent + width), most=most)

    @block.register
    def _table(self, block: Table, group: int) -> Iterator[Piece]:
        has_caption = self.whole and bool(block.caption)
        if has_caption:
            yield Piece(self.lines(block.caption, "  ", "    "), group, block.detail)
        yield from self.rows(block, group, block.detail, "    " if has_caption else "  ")

    def rows(self, block: Table, group: int, rank: int, indent: str) -> Iterator[Piece]:
        """Pieces of a table's rows; on a screen each gives way by itself, the last one first."""
        cells = [[printable(cell) for cell in row] for row in block.rows]
        kinds = "".join(_kind(block, cells, index) for index in range(len(block.columns)))
        if self.whole:
            lines = table(cells, kinds, block.columns, indent=indent)
            yield Piece(tuple(map(Line, lines)), group, rank)
            return
        found = table_rows(cells, kinds, block.columns, indent=indent, spare=block.spare)
        if len(found) > len(cells):  # a head, which says nothing without a row
            head = found.pop(0)
            found[0] = [*head, *found[0]]
        for number, row in enumerate(found):
            place = min(rank + _ROW * number, WHOLE - 1) if 0 < rank < WHOLE else rank
            yield Piece(tuple(map(Line, row)), group, place, block.noun)

    @block.register
    def _chart(self, block: Chart, group: int) -> Iterator[Piece]:
        if block.sketch is not None:
            drawn = tuple(Line(printable(line)) for line in block.sketch(columns()))
            yield Piece(drawn, group, block.detail)
            return
        if self.whole:
            title = (Line(f"  {_text(block.title)}"),)
            says = self.lines(block.says, "    ", "    ") if block.says else ()
            yield Piece((*title, *says), group, block.detail)
        yield from self.rows(block.table, group, block.detail, "    " if self.whole else "  ")

    @block.register
    def _items(self, block: Items, group: int) -> Iterator[Piece]:
        for number, item in enumerate(block.items):
            lines: list[Line] = []
            alone: list[Piece] = []
            for detail, part in self.item(item):
                if detail <= item.detail:
                    lines += part
                else:
                    alone.append(Piece(part, group, _stepped(detail, number), is_part=True))
            yield Piece(tuple(lines), group, _stepped(item.detail, number), block.noun)
            yield from alone

    def item(self, item: Item) -> Iterator[tuple[int, tuple[Line, ...]]]:
        """Its title and its lines, each with how dispensable it is; a screen has no lines that are
        for the whole alone."""
        tag = f"{item.tag}: " if item.tag else ""
        title = self.lines(f"{tag}{item.title}", "  - ", "    ", _STYLES[item.tone])
        yield item.detail, title
        every = [Row(*row) for row in item.rows if row[1]]
        rows = [row for row in every if self.whole or row.detail < WHOLE]
        commands = [snippet for snippet in item.commands if self.whole or snippet.detail < WHOLE]
        fixes = [each for command in commands for each in command.rows]
        width = _label_width([*rows, *fixes])
        for command in commands:
            if command.detail < WHOLE:
                yield command.detail, tuple(self.of_item(command, width))
        before = ""
        for row in rows:
            label = "" if row.label == before else row.label
            yield row.detail, self.fact(Row(label, row.text), 4, width, item.lines)
            before = row.label
        for command in commands:
            if command.detail >= WHOLE:
                yield command.detail, tuple(self.of_item(command, width))

    def of_item(self, command: Snippet, width: int) -> Iterator[Line]:
        if command.rows:
            yield from self.fix(command, 4, width)
            return
        for piece in self.command(command, 0, 0, 4):
            yield from piece.lines

    def fix(self, command: Snippet, indent: int, width: int) -> Iterator[Line]:
        """A command with what takes it back, a line each, and what it costs."""
        for label, text in ((command.label.lower(), command.text), ("undo", command.undo)):
            if text:
                yield Line(f"{' ' * indent}{label:<{width}}{printable(text)}")
        if command.cost:
            yield from self.fact(Row("cost", command.cost), indent, width)


def _stepped(rank: int, number: int) -> int:
    """The rank of one of several pieces; the last one is the most dispensable."""
    return min(rank + _STEP * number, WHOLE - 1) if 0 < rank < WHOLE else rank


def _label_width(rows: Sequence[Row]) -> int:
    least, most = _LABEL
    longest = max((len(row.label) for row in rows), default=0) + 2
    return min(max(longest, least), most)


def _kind(table: Table, cells: Sequence[Sequence[str]], at: int) -> str:
    """The kind of a column, by its longest cell: numbers to the right, long text wrapped."""
    is_long = max(len(row[at]) for row in cells) > _CELL[at > 0]
    return "w" if is_long else "r" if at in table.numeric else "l"
