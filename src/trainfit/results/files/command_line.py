"""The words of a command as one line for bash, and back."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from typing import Final

#: The beginning of a word that sets a variable before a program.
ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
#: A word of a bash command line, quotes and all, as :func:`quote` writes them.
_LINE_WORD: Final = re.compile(
    r"""(?:\$'(?:\\.|[^'\\])*'|'[^']*'|"[^"]*"|\\.|[^\s'"\\])+""",
)
_ANSI_C: Final = re.compile(r"\$'((?:\\.|[^'\\])*)'")


def line_of(words: Iterable[str]) -> str:
    """The words as one line; assignments before a program stay readable."""
    return " ".join(map(quote, words))


def words_of(line: str) -> list[str]:
    """The reverse of :func:`line_of`."""
    return [_unquote(word) for word in quoted_words(line)]


def quoted_words(line: str) -> list[str]:
    """The words of a bash command line, as they are written."""
    return _LINE_WORD.findall(line)


def quote(word: str) -> str:
    """One word of a bash command, printable; an assignment's name stays readable."""
    match = ASSIGNMENT.match(word)
    if match and word[match.end() :]:
        return match.group(0) + quote(word[match.end() :])
    if match or word.isprintable():
        return word if match else shlex.quote(word)
    return "$'" + "".join(_ansi_c(letter) for letter in word) + "'"


def _ansi_c(letter: str) -> str:
    if letter in "\\'":
        return "\\" + letter
    if letter.isprintable():
        return letter
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(letter))


def _unquote(word: str) -> str:
    name = re.match(r"[A-Za-z_][A-Za-z0-9_]*=(?=\$')", word)
    start, rest = (name.group(0), word[name.end() :]) if name else ("", word)
    found = _ANSI_C.fullmatch(rest)
    if found is None:
        return "".join(shlex.split(word))
    escaped = re.split(r"((?:\\x[0-9a-f]{2})+|\\.)", found[1])
    return start + "".join(map(_plain_ansi_c, escaped))


def _plain_ansi_c(part: str) -> str:
    if part.startswith("\\x"):
        return os.fsdecode(bytes.fromhex(part.replace("\\x", "")))
    return part[1:] if part.startswith("\\") else part
