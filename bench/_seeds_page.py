"""The page that the table of the seeds makes, and how a test reads it back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, get_args

from _seeds import ARTICLES, Article, Outcome, Row, Verdict
from _seeds_commands import COMMANDS

_HEAD: Final = """# The seeds, claim by claim

This project began with four articles on fitting a training job to its hardware. Below is each of
their practices, formulas, symptoms and commands, in our words, the trainfit command that answers
it, and what came of it. `python bench/seeds.py --write docs/seeds.md` makes this page: it runs
every command and reads the verdicts out of what they answer.

- *agrees*: our figure is the article's; *differs*: it is not, or the claim is wrong, with the
  reason; *with a condition*: it holds where something else does; *answered*: a question or a
  command, with what gives the answer; *impossible here*: with what would be needed.
- Nothing here was measured on a GPU: memory and step times are simulated, machines with GPUs are
  recorded ones (`tests/machines`). `pace-article` is a model of the author's machine with the
  clocks that the article shows; on the machine itself it is `trainfit pace policy.py:act --setup
  policy.py:load --hz 30,60 --fix governor`.
- Rows on the DataLoader were measured where this page was made, on the cores that they name.
"""
_COLUMNS: Final = "| kind | claim | answered by | verdict |"
_OPEN: Final = "open"


def page(rows: Sequence[tuple[Row, Verdict | None]]) -> str:
    """The whole page, as Markdown."""
    parts = [_HEAD, _counts(rows)]
    for article, title in ARTICLES.items():
        lines = [f"## {title}", "", _COLUMNS, "|---|---|---|---|"]
        lines += [_line(row, verdict) for row, verdict in rows if row.article == article]
        parts.append("\n".join(lines) + "\n")
    parts.append(_commands())
    return "\n".join(parts)


def read_rows(text: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Kind, claim and commands of each row of the articles' tables on a page."""
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
        elif line == _COLUMNS:
            inside = True
        elif inside and not line.startswith("|---"):
            kind, claim, commands, _ = _cells(line)
            yield kind, claim, tuple(each.strip("`") for each in commands.split(", "))


def _cells(line: str) -> list[str]:
    cells = line.replace("\\|", "\0").strip("|").split("|")
    return [cell.strip().replace("\0", "|") for cell in cells]


def _counts(rows: Sequence[tuple[Row, Verdict | None]]) -> str:
    outcomes = (*get_args(Outcome), _OPEN)
    lines = [f"| article | rows | {' | '.join(outcomes)} |", "|---" * (len(outcomes) + 2) + "|"]
    for article in get_args(Article):
        found = [
            verdict.outcome if verdict else _OPEN for row, verdict in rows if row.article == article
        ]
        counts = " | ".join(str(found.count(each)) for each in outcomes)
        lines.append(f"| {ARTICLES[article]} | {len(found)} | {counts} |")
    return "\n".join(lines) + "\n"


def _line(row: Row, verdict: Verdict | None) -> str:
    commands = ", ".join(f"`{name}`" for name in row.commands)
    said = f"**{verdict.outcome}**: {verdict.text}" if verdict else f"**{_OPEN}**"
    cells = (row.kind, row.claim, commands, said)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _commands() -> str:
    lines = ["## The commands", "", "In a checkout, in this order:", "", "```sh"]
    for command in COMMANDS.values():
        lines += [f"# {command.name}", command.line]
    return "\n".join([*lines, "```"]) + "\n"
