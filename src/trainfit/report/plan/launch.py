"""A launch command over several lines."""

from __future__ import annotations

import re

from trainfit.results.text import columns, printable

#: A word of a bash command line, quotes and all.
_WORD = re.compile(r"""(?:\$'(?:\\.|[^'\\])*'|'[^']*'|"[^"]*"|\\.|[^\s'"\\])+""")


def launch_lines(launch: str, indent: int = 2, width: int | None = None) -> str:
    """The launch command, indented and broken between options; bash reads it as one line."""
    width = width or columns()
    lines: list[str] = []
    for group in _option_groups(shell_words(launch)):
        if lines and len(lines[-1]) + 1 + len(group) <= width - 2:
            lines[-1] += " " + group
        else:
            lines.append(" " * (indent + 2 if lines else indent) + group)
    return " \\\n".join(printable(line) for line in lines)


def shell_words(command: str) -> list[str]:
    """The words of a bash command line, as they are written."""
    return _WORD.findall(command)


def _option_groups(words: list[str]) -> list[str]:
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
