"""A page as Markdown: its sections as text and tables, a chart as its table."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Final

from trainfit.report.blocks import (
    Block,
    Chart,
    Facts,
    Headline,
    Item,
    Items,
    Output,
    Page,
    Row,
    Section,
    Snippet,
    Table,
    Text,
)
from trainfit.results.text import printable

#: Characters that mean something in Markdown, and those that begin a tag or an entity of HTML.
_SPECIAL: Final = re.compile(r"([\\`*_\[\]<>&#|~])")
_TICKS: Final = re.compile(r"`+")


def markdown(page: Page) -> str:
    """The whole document."""
    parts = [_text(f"# {_plain(page.title)}")]
    parts += [_headline(head) for head in page.headlines]
    parts += [_section(section) for section in page.sections]
    sources = ", ".join(f"{_code(name)} ({kind})" for name, kind in page.sources)
    parts.append(f"trainfit {page.version}; made from {sources}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(head: Headline) -> str:
    parts = [f"## {_plain(head.kind)}: {_plain(head.text)}"]
    parts += [_plain(text) for text in (head.subject, head.limit) if text]
    parts += [_block(command) for command in head.commands]
    parts += ["\n".join(f"- {_plain(change)}" for change in head.changes)]
    tiles = [
        f"- {_plain(tile.label)}: **{_plain(tile.value)}**"
        + (f" ({_plain(tile.detail)})" if tile.detail else "")
        for tile in head.tiles
    ]
    return "\n\n".join(part for part in (*parts, "\n".join(tiles)) if part)


def _section(section: Section) -> str:
    parts = [f"## {_plain(section.title)}", _plain(section.answer)]
    return "\n\n".join(part for part in (*parts, *map(_block, section.blocks)) if part)


@functools.singledispatch
def _block(block: Block) -> str:
    raise TypeError(type(block).__name__)


@_block.register
def _command(block: Snippet) -> str:
    label = f"{_plain(block.label)}:\n\n" if block.label else ""
    rows = _rows(block.rows)
    return "\n\n".join(part for part in (label + _fenced(block.text), rows) if part)


@_block.register
def _paragraph(block: Text) -> str:
    return _plain(block.text)


@_block.register
def _output(block: Output) -> str:
    return _fenced(block.text)


@_block.register
def _facts(block: Facts) -> str:
    return _rows(block.rows)


def _rows(rows: Sequence[Row]) -> str:
    """A list item each; a row without a label belongs to the one above it."""
    lines = (f"- {_plain(row.label)}: " if row.label else "  - " for row in rows)
    return "\n".join(f"{line}{_plain(row.text)}" for line, row in zip(lines, rows, strict=True))


@_block.register
def _table(block: Table) -> str:
    align = ["---:" if n in block.numeric else "---" for n in range(len(block.columns))]
    rows = [
        [f"**{cell}**" if n in block.marked and cell else cell for cell in map(_plain, row)]
        for n, row in enumerate(block.rows)
    ]
    lines = [list(map(_plain, block.columns)), align, *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{_plain(block.caption)}\n\n{text}" if block.caption else text


@_block.register
def _chart(block: Chart) -> str:
    parts = [f"### {_plain(block.title)}", _plain(block.says), _table(block.table)]
    return "\n\n".join(part for part in (*parts, _plain(block.note)) if part)


@_block.register
def _items(block: Items) -> str:
    return "\n".join(map(_item, block.items))


def _item(item: Item) -> str:
    tag = f" ({_plain(item.tag)})" if item.tag else ""
    lines = [f"- **{_plain(item.title)}**{tag}"]
    lines += [f"  - {_plain(row[0])}: {_plain(row[1])}" for row in item.rows if row[1]]
    for command in item.commands:
        label = f"{_plain(command.label)}: " if command.label else ""
        lines.append(f"  - {label}{_code(command.text)}")
        lines += [f"    - {_plain(row.label)}: {_plain(row.text)}" for row in command.rows]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """The text on one line, with nothing in it that means something to Markdown or HTML."""
    return _SPECIAL.sub(r"\\\1", _text(" ".join(text.split())))


def _text(text: str) -> str:
    return printable(text)


def _code(text: str) -> str:
    """A code span that no backtick in it ends; on one line."""
    line = printable(" ".join(text.split()))
    ticks = "`" * (_longest(line) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{pad}{line}{pad}{ticks}"


def _fenced(text: str) -> str:
    fence = "`" * max(3, _longest(text) + 1)
    return f"{fence}\n{printable(text.rstrip(), lines=True)}\n{fence}"


def _longest(text: str) -> int:
    return max(map(len, _TICKS.findall(text)), default=0)
