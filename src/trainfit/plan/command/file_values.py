"""Tunables that a file holds: a constant of the script, a line of a configuration file.

A constant counts as the batch size (``batch_size = 20``) where neither an option nor a DataLoader
says it: only at the top level of the script, and only where that is its one assignment there. A run
with another value has to show it in the model's calls, as for an option.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from trainfit.plan.command.options import tunable_of
from trainfit.plan.command.parsing import Command
from trainfit.scripts.option_parsers import constants_of


@dataclasses.dataclass(frozen=True)
class ScriptConstant:
    """``name`` has ``value`` at ``place`` ("train.py:18")."""

    name: str
    value: int
    place: str


def batch_constant(command: Command, seen: int | None) -> ScriptConstant | None:
    """The one that has the batch size that was ``seen``; ``None``: there is none, or several."""
    path = Path(command.name)
    if seen is None or command.kind != "script" or command.launcher is not None:
        return None
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    found = [
        ScriptConstant(name, value.value, f"{command.name}:{value.lineno}")
        for name, value in constants_of(tree).items()
        if tunable_of(name) == "batch_size" and value.value == seen
    ]
    return found[0] if len(found) == 1 else None


# ---
# The line of a configuration file (YAML, JSON, TOML) that holds a tunable's value.
#
# By name, as the field calls them (:mod:`trainfit.plan.command.options`), and by value: the line
# has what the run saw. A file counts if the command names it, else if a text in the script does.


#: Endings of files that are read.
_SUFFIXES: Final = (".yaml", ".yml", ".json", ".toml")
#: Bytes of a file that is read, at most.
_LARGEST: Final = 1 << 20
#: A file that a script names.
_NAMED: Final = re.compile(r"""["']([^"'\n{}]{1,200}\.(?:ya?ml|json|toml))["']""")
#: A key with a plain value, alone on its line or within braces.
_ENTRY: Final = re.compile(
    r"""(?P<quote>["']?)(?P<key>[A-Za-z_][\w.-]*)(?P=quote)\s*(?P<is>[:=])\s*"""
    r"""(?P<value>[A-Za-z]+|\d{1,9})\s*(?=[,}\]\r\n#]|$)"""
)
_COMMENT: Final = re.compile(r"(?m)^\s*#.*$")


@dataclasses.dataclass(frozen=True)
class ConfigLine:
    """``place`` is the file and line ("config.yaml:7"); ``text`` what to write there."""

    place: str
    text: str


def config_line(command: Command, name: str, present: str, value: str) -> ConfigLine | None:
    """The line that gives the tunable ``name`` its ``present`` value, with ``value`` in its place;
    ``None`` where there is none, or more than one."""
    for files in (_of_command(command), _of_script(command)):
        found = [line for file in files for line in _lines(file, name, present, value)]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _of_command(command: Command) -> list[Path]:
    words = command.fill()[command.arguments_at :]
    names = [name for word in words for name in (word, word.partition("=")[2])]
    return _existing(Path(name) for name in names)


def _of_script(command: Command) -> list[Path]:
    script = Path(command.name)
    if command.kind != "script" or not script.is_file():
        return []
    named = _NAMED.findall(script.read_text(encoding="utf-8", errors="replace"))
    return _existing(folder / name for name in named for folder in (Path(), script.parent))


def _existing(paths: Iterator[Path]) -> list[Path]:
    found: dict[Path, Path] = {}
    for path in paths:
        try:
            if path.suffix in _SUFFIXES and path.is_file() and path.stat().st_size <= _LARGEST:
                found.setdefault(path.resolve(), path)
        except (OSError, ValueError):  # a word that is no path
            continue
    return list(found.values())


def _lines(file: Path, name: str, present: str, value: str) -> Iterator[ConfigLine]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    text = _COMMENT.sub(lambda found: " " * len(found[0]), text)
    for entry in _ENTRY.finditer(text):
        if tunable_of(entry["key"]) != name or entry["value"].lower() != present.lower():
            continue
        written = value.lower() if value in ("True", "False") else value
        key, between = entry["quote"] + entry["key"] + entry["quote"], entry["is"]
        space = " " if between == ":" else ""
        number = text.count("\n", 0, entry.start("key")) + 1
        yield ConfigLine(f"{file}:{number}", f"{key}{between}{space}{written}")
