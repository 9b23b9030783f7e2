"""Tunables that a file holds: a constant of the script, a line of a configuration file.

A constant counts as the batch size (``batch_size = 20``) where neither an option nor a DataLoader
says it: only at the top level of the script, and only where that is its one assignment there. A run
with another value has to show it in the model's calls, as for an option.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from trainfit.findings.source_code import file_syntax
from trainfit.plan.command.options import DTYPE_OF_SWITCH, plain_name, tunable_of
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.tunables import FRAMEWORKS, PRECISIONS, as_switch, opposite_switch
from trainfit.results.runs.steps import Framework
from trainfit.scripts.option_parsers import constants_of


@dataclasses.dataclass(frozen=True)
class ScriptConstant:
    """``name`` has ``value`` at ``place`` ("train.py:18")."""

    name: str
    value: int
    place: str


def batch_constant(command: Command, batch: int | None) -> ScriptConstant | None:
    """The one that has the batch size that was ``batch``; ``None``: there is none, or several."""
    if batch is None or command.kind != "script" or command.launcher is not None:
        return None
    tree = file_syntax(os.path.abspath(command.name))
    if tree is None:
        return None
    constants = [
        ScriptConstant(name, value.value, f"{command.name}:{value.lineno}")
        for name, value in constants_of(tree).items()
        if tunable_of(name) == "batch_size" and value.value == batch
    ]
    return constants[0] if len(constants) == 1 else None


# ---
# The line of a configuration file (YAML, JSON, TOML) that holds a tunable's value.
#
# By name, as the field calls them (:mod:`trainfit.plan.command.options`), and by value: the line
# has what the run saw. A file counts if the command names it, else if a text in the script does,
# else if it is below the folder of Hydra's settings.


#: Endings of files that are read.
_SUFFIXES: Final = (".yaml", ".yml", ".json", ".toml")
#: Bytes of a file that is read, at most.
_LARGEST: Final = 1 << 20
#: A file that a script names.
_NAMED: Final = re.compile(r"""["']([^"'\n{}]{1,200}\.(?:ya?ml|json|toml))["']""")
#: The folder of Hydra's settings, from that of the script; files of it that are read at most.
_FOLDER: Final = re.compile(r"""\bconfig_path\s*=\s*["']([^"'\n{}]{1,200})["']""")
_MOST_FILES: Final = 100
#: A key with a plain value, alone on its line or within braces.
_ENTRY: Final = re.compile(
    r"""(?P<quote>["']?)(?P<key>[A-Za-z_][\w.-]*)(?P=quote)\s*(?P<is>[:=])\s*"""
    r"""(?P<text>["']?)(?P<value>[A-Za-z0-9_.-]{1,20})(?P=text)\s*(?=[,}\]\r\n#]|$)"""
)
_BETWEEN: Final = {".yaml": ": ", ".yml": ": ", ".json": ": ", ".toml": " = "}
#: A switch that is on where the GPU can.
_AUTO: Final = {"auto": "true"}
_COMMENT: Final = re.compile(r"(?m)^\s*#.*$")


@dataclasses.dataclass(frozen=True)
class ConfigLine:
    """``place`` is the file and line ("config.yaml:7"); ``text`` what to write there."""

    place: str
    text: str


def config_line(command: Command, name: str, present: str, value: str) -> ConfigLine | None:
    """The line that gives the tunable ``name`` its ``present`` value, with ``value`` in its place;
    ``None`` where there is none, or more than one."""

    def changed(key: str, now: str) -> str | None:
        is_it = tunable_of(key) == name and now.lower() == present.lower()
        return (value.lower() if value in ("True", "False") else value) if is_it else None

    return _only_line(command, changed)


def precision_line(
    command: Command, present: str, dtype: str, framework: Framework
) -> ConfigLine | None:
    """The line that makes autocast compute in ``dtype`` ("off": not at all) where it does in
    ``present``; ``None`` where there is none, or more than one.

    A file that has the arguments of ``framework``, but none for its precision, gets one.
    """
    line = _only_line(command, lambda key, now: _other_precision(key, now, present, dtype))
    if line is not None or not framework or dtype == "off":
        return line
    call = FRAMEWORKS[framework]
    named = {file: {entry["key"] for entry in _entries(file)} for file in _of_command(command)}
    files = [file for file, keys in named.items() if keys.intersection(call.names.values())]
    if len(files) != 1 or any(tunable_of(key) == "amp" for key in named[files[0]]):
        return None
    key, _, value = call.precision[dtype].partition("=")
    quote, between = ('"' if files[0].suffix == ".json" else ""), _BETWEEN[files[0].suffix]
    return ConfigLine(str(files[0]), f"{quote}{key}{quote}{between}{value.lower()}")


def _other_precision(key: str, now: str, present: str, dtype: str) -> str | None:
    """What to write for a key that says ``present``, so that it says ``dtype``; ``None``: it does
    not say that, or cannot."""
    if tunable_of(key) != "amp":
        return None
    is_on, own = as_switch(_AUTO.get(now, now)), DTYPE_OF_SWITCH.get(plain_name(key))
    if is_on is not None and "precision" not in plain_name(key):
        # A switch of one dtype asks for that one alone; any other leaves it to the script.
        half = present if dtype == "off" else dtype
        turns = is_on is (dtype == "off") and is_on is (present != "off")
        return opposite_switch(_AUTO.get(now, now)) if turns and own in (None, half) else None
    for spelled in PRECISIONS:
        by_dtype = dict(zip(("bfloat16", "float16", "off"), spelled, strict=True))
        if by_dtype[present] == now:
            return by_dtype[dtype]
    return None


def _only_line(command: Command, changed: Callable[[str, str], str | None]) -> ConfigLine | None:
    """The one entry that is to be ``changed``, by its key and its value."""
    for files in _files(command):
        lines = [line for file in files for line in _lines(file, changed)]
        if lines:
            return lines[0] if len(lines) == 1 else None
    return None


def _files(command: Command) -> Iterator[list[Path]]:
    """The settings files that count, the nearest first."""
    yield _of_command(command)
    yield _of_script(command)
    yield _of_hydra(command)


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


def _of_hydra(command: Command) -> list[Path]:
    script = Path(command.name)
    if command.kind != "script" or not script.is_file():
        return []
    folder = _FOLDER.search(script.read_text(encoding="utf-8", errors="replace"))
    if folder is None:
        return []
    below = (script.parent / folder[1]).rglob("*.y*ml")
    return _existing(itertools.islice(below, _MOST_FILES))


def _existing(paths: Iterator[Path]) -> list[Path]:
    found: dict[Path, Path] = {}
    for path in paths:
        try:
            if path.suffix in _SUFFIXES and path.is_file() and path.stat().st_size <= _LARGEST:
                found.setdefault(path.resolve(), path)
        except (OSError, ValueError):  # a word that is no path
            continue
    return list(found.values())


def _entries(file: Path) -> Iterator[re.Match[str]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    yield from _ENTRY.finditer(_COMMENT.sub(lambda found: " " * len(found[0]), text))


def _lines(file: Path, changed: Callable[[str, str], str | None]) -> Iterator[ConfigLine]:
    for entry in _entries(file):
        value = changed(entry["key"], entry["value"])
        if value is None:
            continue
        key, between = entry["quote"] + entry["key"] + entry["quote"], entry["is"]
        space = " " if between == ":" else ""
        number = entry.string.count("\n", 0, entry.start("key")) + 1
        written = entry["text"] + value + entry["text"]
        yield ConfigLine(f"{file}:{number}", f"{key}{between}{space}{written}")
