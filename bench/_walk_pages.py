"""What a page of the documentation tells its reader to type, and what it says is printed.

A code block of Markdown is a file to save (a fence with ``title="NAME"``), Python (a fence),
commands (its first word is a program's name) or a sample screen, which is printed by the last
command before it. Comments that only the source shows say the rest, each before its block::

    <!-- not run: REASON -->               its commands are not typed
    <!-- not run `PIECE`: REASON -->       those that contain PIECE are not
    <!-- exit code 1 `PIECE`: REASON -->   those that contain PIECE (or all) may also end so
    <!-- screen of `COMMAND` -->           another command's screen than the last one's
    <!-- measured -->                      a screen whose lines and figures the machine decides
    <!-- no screen: REASON -->             neither commands nor a screen
    <!-- picture: COMMAND -->              draws the picture that follows

A new sample may begin as "…" alone: writing it makes it the screen.

markdown-it-py parses the page (rich brings it): it knows the lines of each block, which is what
rewriting one in place needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from markdown_it import MarkdownIt

#: First words of commands, after any ``NAME=value``.
_TYPED: Final = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:trainfit|python3?|make|git|pip|export|source|cd|\.|\.ci/run)(?: |$)"
)
_SHELLS: Final = {"sh", "bash", "shell", "console"}
_COMMENT: Final = re.compile(r"<!--\s*(.*?)\s*-->", re.DOTALL)
_RULE: Final = re.compile(r"(not run|exit code \d+)(?: `([^`]+)`)?: (.+)", re.DOTALL)
_TITLE: Final = re.compile(r'title="([^"]+)"')
_REMARK: Final = re.compile(r"(?:^|\s+)#(?: |$)")
PLACEHOLDER: Final = "…"


@dataclass(frozen=True)
class TypedCommand:
    """A command as it is typed, its lines joined and its remark left out."""

    text: str
    line: int
    #: Why a walk does not type it.
    reason: str | None = None
    codes: frozenset[int] = frozenset({0})


@dataclass(frozen=True)
class Screen:
    """A sample of what ``command`` prints: lines ``first`` to ``end`` (exclusive) of the page."""

    first: int
    end: int
    indent: str
    text: tuple[str, ...]
    command: str
    #: The machine decides which lines are there, and their figures.
    measured: bool = False


@dataclass(frozen=True)
class SavedFile:
    """A file that the reader saves."""

    name: str
    text: str
    line: int


@dataclass(frozen=True)
class PythonBlock:
    """Python that the reader types or pastes."""

    text: str
    line: int
    reason: str | None = None


@dataclass(frozen=True)
class Picture:
    """The command that draws the picture after it."""

    command: str
    line: int


Part = TypedCommand | Screen | SavedFile | PythonBlock | Picture


class PageError(ValueError):
    """A page with a block or a comment that cannot be read; names the line."""


def parts(markdown: str) -> list[Part]:
    """The parts of a page in the order in which they are read.

    Raises:
        PageError: a screen without a command before it, or a comment of no known form.
    """
    found: list[Part] = []
    said: list[str] = []
    last: str | None = None
    for token in MarkdownIt("commonmark").parse(markdown):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            said += _COMMENT.findall(token.content)
            pictures = [text for text in said if text.startswith("picture: ")]
            found += [Picture(text.removeprefix("picture: "), line) for text in pictures]
            said = [text for text in said if text not in pictures]
        elif token.type in ("code_block", "fence"):
            block = _block(token.type, token.info, token.content, token.map or [0, 0])
            made = _made(block, _Said.read(said, line), last)
            typed = [part for part in made if isinstance(part, TypedCommand)]
            last = typed[-1].text if typed else last
            found += made
            said = []
    if said:
        raise PageError(f"no block follows the comment {said[0]!r}")
    return found


@dataclass(frozen=True)
class _CodeBlock:
    info: str
    text: str
    first: int
    end: int
    indent: str


def _block(kind: str, info: str, text: str, lines: list[int]) -> _CodeBlock:
    first, end = lines
    if kind == "fence":
        return _CodeBlock(info.strip(), text, first + 1, end - 1, "")
    text = text.rstrip("\n") + "\n"
    return _CodeBlock("", text, first, first + text.count("\n"), "    ")


@dataclass(frozen=True)
class _Said:
    """The comments before a block."""

    rules: tuple[tuple[str, str, str], ...] = ()
    screen_of: str | None = None
    measured: bool = False
    no_screen: bool = False

    @classmethod
    def read(cls, comments: list[str], line: int) -> _Said:
        said = cls()
        for text in comments:
            if rule := _RULE.fullmatch(text):
                said = replace(said, rules=(*said.rules, (rule[1], rule[2] or "", rule[3])))
            elif text.startswith("screen of `") and text.endswith("`"):
                said = replace(said, screen_of=text[len("screen of `") : -1])
            elif text == "measured":
                said = replace(said, measured=True)
            elif text.startswith("no screen: "):
                said = replace(said, no_screen=True)
            else:
                raise PageError(f"line {line}: a comment of no known form: {text!r}")
        return said

    def reason(self, text: str) -> str | None:
        reasons = [why for rule, piece, why in self.rules if rule == "not run" and piece in text]
        return reasons[0] if reasons else None

    def codes(self, text: str) -> frozenset[int]:
        rules = [rule for rule, piece, _ in self.rules if rule != "not run" and piece in text]
        return frozenset({0, *(int(rule.removeprefix("exit code ")) for rule in rules)})


def _made(block: _CodeBlock, said: _Said, last: str | None) -> list[Part]:
    title = _TITLE.search(block.info)
    language = block.info.split(" ")[0]
    if said.no_screen:
        return []
    if title:
        return [SavedFile(title[1], block.text, block.first)]
    if language in ("python", "py"):
        return [PythonBlock(block.text, block.first, said.reason(block.text))]
    shell = language in _SHELLS or (language == "" and _TYPED.match(block.text))
    if shell and said.screen_of is None:
        return list(_commands(block, said))
    if language not in ("", "text"):
        return []
    command = said.screen_of or last
    if command is None:
        raise PageError(f"line {block.first}: a screen with no command before it")
    lines = tuple(block.text.rstrip("\n").split("\n"))
    return [Screen(block.first, block.end, block.indent, lines, command, said.measured)]


def _commands(block: _CodeBlock, said: _Said) -> list[TypedCommand]:
    commands, text, start = [], "", block.first
    for number, line in enumerate(block.text.splitlines(), block.first + 1):
        start = start if text else number
        text += _REMARK.split(line)[0].strip()
        if text.endswith("\\"):
            text = text[:-1]
            continue
        if text:
            why = said.reason(text)
            if PLACEHOLDER in text:
                why = why or "the reader's own command"
            commands.append(TypedCommand(text, start, why, said.codes(text)))
        text = ""
    return commands
