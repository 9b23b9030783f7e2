"""The file of a sweep: commands × GPUs × counts × values, and the cells that these make.

The file::

    commands = ["torchrun --nproc_per_node={gpus} train.py --seq_len={seq_len:1024}"]
    gpus = ["RTX 4090", "H100 SXM"]
    counts = [1, 2, 8]

    [values]
    seq_len = [1024, 2048]

    [options]
    steps = 3
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trainfit.hardware import GpuNameError, GpuSpec
from trainfit.hardware.gpu_topology import find_gpus, named_count
from trainfit.plan.command.parsing import Command, parse_command
from trainfit.plan.command.tunables import (
    ALIASES,
    LENGTHS,
    TUNABLES,
    CommandError,
    as_switch,
    opposite_switch,
)
from trainfit.results.files.decoding import toml_document
from trainfit.results.files.errors import TrainfitError
from trainfit.results.runs.sweep import SweepVerb

#: Options of each verb that a file may set; what else there is the sweep itself decides.
OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "plan": (
        *("cpu", "force-profile", "headroom", "no-remedies", "noise-scale", "other-processes"),
        *("profile", "remedies", "solve", "steps", "thorough", "time-limit"),
    ),
    "simulate": ("other-processes", "steps", "time-limit"),
}
#: Cells of a sweep at most: each takes seconds to minutes.
MOST_CELLS: Final = 10_000
#: Places that the machine fills: processes to start on each machine, and machines.
_OF_MACHINE: Final = ("gpus", "machines")
_KEYS: Final = ("commands", "gpus", "counts", "values", "verb", "options")
_COMMAND_KEYS: Final = ("line", "name", "values")
_EXAMPLE: Final = 'commands = ["python train.py --batch_size={batch_size:8}"]'
#: A place for a value; double braces are literal ones.
_PLACE: Final = re.compile(r"\{\{[^{}]*\}\}|\{(?P<name>[A-Za-z_]\w*)(?::(?P<value>[^{}]*))?\}")


class SweepFileError(TrainfitError):
    """A file of a sweep that cannot be used; the message names the place and the remedy."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A command with ``values`` filled in, to be planned for ``gpu``.

    ``name`` is the command as the user names it; ``words`` still have the tunables, with these
    values as the current ones. ``command`` is what they were read as.
    """

    name: str
    words: tuple[str, ...]
    values: Mapping[str, str]
    gpu: str
    spec: GpuSpec
    command: Command


@dataclasses.dataclass(frozen=True)
class Sweep:
    """``options`` are words of the verb's command line, ``names`` the values that differ."""

    path: Path
    verb: SweepVerb
    options: tuple[str, ...]
    cells: tuple[Cell, ...]
    names: tuple[str, ...]


def read_sweep(path: Path) -> Sweep:
    """Read a sweep's file, and check each of its cells as far as that needs no run.

    Raises :class:`SweepFileError` for a file that is missing, no TOML, or says what cannot be.
    """
    document = toml_document(path, "sweep", SweepFileError, f"begin it with {_EXAMPLE}")
    reader = _GridReader(path)
    reader.known(document, _KEYS, "key")
    verb = document.get("verb", "plan")
    if verb not in OPTIONS:
        raise reader.error(f"verb = {verb!r}: expected {' or '.join(map(repr, OPTIONS))}")
    options = reader.options(document.get("options", {}), verb)
    machines = list(reader.machines(document))
    given = reader.values(document.get("values", {}), "values")
    cells: dict[tuple[object, ...], Cell] = {}
    names: dict[str, None] = {}
    for name, line, own in reader.commands(document):
        values = {**given, **own}
        names |= dict.fromkeys(values)
        product = math.prod(map(len, values.values())) * len(machines)
        if len(cells) + product > MOST_CELLS:
            raise reader.error(f"it has more than {MOST_CELLS} cells; leave some values out")
        for (gpu, spec), chosen in itertools.product(machines, _combinations(values)):
            cell = reader.cell(name, line, gpu, spec, chosen)
            cells.setdefault((cell.name, cell.words, gpu), cell)
    return Sweep(path, verb, options, tuple(cells.values()), tuple(names))


def _combinations(values: Mapping[str, Sequence[object]]) -> Iterator[dict[str, object]]:
    for chosen in itertools.product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


class _GridReader:
    """Checks what a sweep's file says; its errors name the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._commands: dict[tuple[str, ...], Command] = {}

    def error(self, text: str) -> SweepFileError:
        return SweepFileError(f"sweep file {str(self._path)!r}: {text}")

    def known(self, table: Iterable[str], names: Sequence[str], what: str) -> None:
        for each in table:
            if each not in names:
                near = difflib.get_close_matches(each, names, 1, 0.7)
                meant = f"; did you mean {near[0]!r}?" if near else ""
                raise self.error(f"unknown {what} {each!r}{meant} (known: {', '.join(names)})")

    def options(self, table: object, verb: str) -> tuple[str, ...]:
        """Words for the verb's command line."""
        if not isinstance(table, dict):
            raise self.error("[options] expects a table, such as steps = 3")
        names = {key: key.replace("_", "-") for key in table}
        self.known(names.values(), OPTIONS[verb], f"option of {verb}")
        texts = []
        for key, value in table.items():
            if value is True:
                texts.append(f"--{names[key]}")
            elif value is not False:
                texts.append(f"--{names[key]}={self._text(value, f'options.{key}')}")
        return tuple(texts)

    def machines(self, document: Mapping[str, Any]) -> Iterator[tuple[str, GpuSpec]]:
        """Each GPU with each count, and what it is."""
        names = self._list(document, "gpus", str, '["RTX 4090", "H100 SXM"]')
        counts: Sequence[int | None] = [None]
        if "counts" in document:
            counts = self._list(document, "counts", int, "[1, 2, 8]")
        for name, number in itertools.product(names, counts):
            try:
                if number is not None and named_count(name) is not None:
                    raise self.error(f"gpus: {name!r} has a count of its own; leave out `counts`")
                gpu = name if number in (None, 1) else f"{number}x {name}"
                yield gpu, find_gpus(gpu)
            except GpuNameError as error:
                raise self.error(f"gpus: {error}") from None

    def commands(
        self, document: Mapping[str, Any]
    ) -> Iterator[tuple[str, str, Mapping[str, Sequence[object]]]]:
        """The name, the line and the own values of each command."""
        given = document.get("commands", [])
        if not isinstance(given, list):
            raise self.error(f"commands = {given!r}: expected a list; write {_EXAMPLE}")
        if not given:
            raise self.error(f"it has no commands; write {_EXAMPLE}")
        for each in given:
            table = {"line": each} if isinstance(each, str) else each
            if not isinstance(table, dict) or not isinstance(table.get("line"), str):
                raise self.error(f"commands: {each!r}: expected a line; write {_EXAMPLE}")
            self.known(table, _COMMAND_KEYS, "key of a command")
            name = table.get("name", table["line"])
            if not isinstance(name, str) or not name:
                raise self.error(f"commands: name = {name!r}: expected a text")
            yield name, table["line"], self.values(table.get("values", {}), "values of a command")

    def values(self, table: object, what: str) -> dict[str, Sequence[object]]:
        """The values of each name."""
        if not isinstance(table, dict):
            raise self.error(f"[{what}] expects a table, such as seq_len = [512, 1024]")
        found: dict[str, Sequence[object]] = {}
        for name, given in table.items():
            if name in _OF_MACHINE:
                raise self.error(f"{what}: {name!r} follows from `gpus` and `counts`")
            several = given if isinstance(given, list) else [given]
            if not several:
                raise self.error(f"{what}: {name} = []: it has no value, so there is no cell")
            for each in several:
                self._text(each, f"{what}: {name}")
            found[name] = several
        return found

    def cell(
        self, name: str, line: str, gpu: str, spec: GpuSpec, chosen: Mapping[str, object]
    ) -> Cell:
        """One cell; raises :class:`SweepFileError` for a value that its command has no place for,
        or that it does not take."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise self.error(f"command {line!r}: {error}; correct its quotes") from None
        machine = {"gpus": spec.count, "machines": spec.machines}
        texts: dict[str, str] = {}
        for key, value in {**machine, **chosen}.items():
            words, text = _with_value(words, key, value)
            if text is None and key in chosen:
                raise self.error(
                    f"values: command {line!r} has no place for {key!r}; write {{{key}:VALUE}} "
                    "into it, or give the commands values of their own"
                )
            if text is not None and key in chosen:
                texts[key] = text
        try:
            command = self._commands.get(tuple(words)) or parse_command(words, several=True)
        except CommandError as error:
            raise self.error(str(error)) from None
        self._commands[tuple(words)] = command
        return Cell(name, tuple(words), texts, gpu, spec, command)

    def _list(self, document: Mapping[str, Any], key: str, kind: type, example: str) -> list[Any]:
        given = document.get(key, [])
        if not isinstance(given, list):
            raise self.error(f"{key} = {given!r}: expected a list; write {key} = {example}")
        if not given:
            raise self.error(f"it has no {key}; write {key} = {example}")
        for each in given:
            good = isinstance(each, kind) and not isinstance(each, bool)
            if not good or (kind is int and each < 1):
                raise self.error(f"{key}: {each!r}: write {key} = {example}")
        return given

    def _text(self, value: object, where: str) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, str | int | float) and value == value:
            return str(value)
        raise self.error(f"{where}: {value!r}: expected a number, a text, true or false")


def _with_value(words: Sequence[str], name: str, value: object) -> tuple[list[str], str | None]:
    """``words`` with this value, and how it is written there; ``None``: they have no place for it.

    The place of a tunable stays one, with this as its current value.
    """
    usual, written = ALIASES.get(name, name), list[str]()

    def filled(match: re.Match[str]) -> str:
        here = match["name"]
        if here is None or ALIASES.get(here, here) != usual:
            return match[0]
        text = _spelled(value, match["value"])
        written.append(text)
        return f"{{{here}:{text}}}" if usual in (*TUNABLES, *LENGTHS) else text

    made = [_PLACE.sub(filled, word) for word in words]
    return made, written[0] if written else None


def _spelled(value: object, present: str | None) -> str:
    """``value`` as text; on and off in the spelling of the present value."""
    if not isinstance(value, bool):
        return str(value)
    on = as_switch(present)
    if present is None or on is None:
        return "true" if value else "false"
    return present if on == value else opposite_switch(present)
