"""The lines of a user's files that its tunables come from, where no option says them.

Of the user's calls that led to the DataLoader the innermost that has the batch size itself is the
line: ``fit(model, data, batch_size=32)`` of a library that makes the DataLoader, too. A name, an
attribute or an entry in its place is looked for in those files: a parameter's default, a field of a
configuration class, an argument of a call, an entry of a dictionary. Only where one place alone has
the number is it the line. Other settings of the DataLoader are arguments of the innermost call that
has a parameter for them. Lines of installed packages are not the user's to change, also where one
is what runs (``tune run``, ``trl sft``). Nothing is executed.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from trainfit.lint.imports import Source, UnreadableError, load
from trainfit.plan.command.options import tunable_of
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.tunables import LOADER_TUNABLES
from trainfit.results.changes import ScriptLine
from trainfit.results.runs.trace import CallSite
from trainfit.simgpu.device.user_location import is_installed

_LOADER: Final = "DataLoader"
_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {_LOADER: ("dataset", "batch_size")}


def script_lines(
    command: Command, batch: int | None, sites: Sequence[CallSite]
) -> dict[str, ScriptLine]:
    """The lines to change, by tunable; fewer where that cannot be told.

    ``batch`` is the batch size that was seen (``None``: not known); ``sites`` are the user's calls
    that the DataLoader was made in, the innermost first.
    """
    places = [site.place for site in sites if site.place]
    files = [_file_of(place) for place in places if not is_installed(place)]
    if command.kind == "script":
        files.append(command.name)
    names = {str(Path(name).resolve()): name for name in reversed(files)}
    sources = [source for name in names.values() if (source := _read(name)) is not None]
    search = _Search(sources, sites)
    found = search.settings()
    line = search.batch(batch) if batch is not None else None
    return {**found, "batch_size": line} if line is not None else found


def is_packages(place: str, command: Command) -> bool:
    """Is a line at ``place`` (empty: not known where) an installed package's?

    What is not known is in the package whose console script the command runs: that has no lines of
    its own.
    """
    if place:
        return is_installed(place)
    program = Path(command.name)
    # pip writes a console script next to the interpreter that it was installed for.
    return command.kind == "script" and not program.suffix and (program.parent / "python").exists()


def package_says(place: str) -> str:
    """Why a change at ``place`` is not asked for."""
    where = f" at {place}" if place else ""
    return f"no option of the command says it, and the line{where} is an installed package's"


def _file_of(place: str) -> str:
    return place.rpartition(":")[0]


def _read(name: str) -> Source | None:
    try:
        return load(Path(name), name)
    except UnreadableError:
        return None


@dataclasses.dataclass(frozen=True)
class _Search:
    sources: Sequence[Source]
    sites: Sequence[CallSite]

    def settings(self) -> dict[str, ScriptLine]:
        """The settings of the DataLoader, but for the batch size; where the user makes it, those
        that a dictionary gives it (``**kwargs``): Python refuses an argument that comes twice."""
        found: dict[str, ScriptLine] = {}
        for site, source, call in self._calls():
            name = _name(call.func)
            if name == _LOADER:
                return dict(_unpacked(source, call))
            for parameter in site.parameters if name == site.called else ():
                if (tunable := tunable_of(parameter)) in LOADER_TUNABLES and tunable not in found:
                    place = f"{source.name}:{call.lineno}"
                    found[tunable] = ScriptLine(place, f"{parameter}={{}}", name)
        return found

    def batch(self, batch: int) -> ScriptLine | None:
        """The line at which the batch size is written; ``None``: nowhere, or in several places."""
        wanted: set[str] = set()
        for _, source, call in self._calls():
            arguments = list(self._arguments(source, call, batch, set()))
            if arguments:
                return arguments[0][1]
            wanted |= _names_of(call)
        lines = [each for source in self.sources for each in self._written(source, batch, wanted)]
        asked = [line for name, line in lines if name in wanted]
        different = list(dict.fromkeys(asked or [line for _, line in lines]))
        return different[0] if len(different) == 1 else None

    def _calls(self) -> Iterator[tuple[CallSite, Source, ast.Call]]:
        """The calls that the DataLoader was made in, the innermost first."""
        by_path = {source.path.resolve(): source for source in self.sources}
        for site in self.sites:
            source = by_path.get(Path(_file_of(site.place)).resolve())
            number = site.place.rpartition(":")[2]
            if source is None or not number.isdigit():
                continue
            line = int(number)
            calls = [
                node
                for node in ast.walk(source.tree)
                if isinstance(node, ast.Call)
                and node.lineno <= line <= (node.end_lineno or node.lineno)
            ]
            calls.sort(key=lambda call: (call.end_lineno or 0) - call.lineno)
            yield from ((site, source, call) for call in calls)

    def _arguments(
        self, source: Source, call: ast.Call, batch: int, wanted: set[str]
    ) -> Iterator[tuple[str, ScriptLine]]:
        """Arguments of a call that are the number, by their names or their parameters'."""
        name = _name(call.func)
        given = [(keyword.arg or "", keyword.value) for keyword in call.keywords]
        known = {site.called: site.parameters for site in reversed(self.sites)}
        for argument, parameter in zip(
            call.args, {**known, **_PARAMETERS}.get(name, ()), strict=False
        ):
            if isinstance(argument, ast.Starred):
                break
            given.append((parameter, argument))
        for parameter, value in given:
            if _is_it(parameter, value, batch, wanted):
                place = f"{source.name}:{value.lineno}"
                yield parameter, ScriptLine(place, f"{parameter}={{}}", name)

    def _written(
        self, source: Source, batch: int, wanted: set[str]
    ) -> Iterator[tuple[str, ScriptLine]]:
        """Each place where a name of the batch size has the number."""

        def found(name: str, value: ast.expr, text: str) -> Iterator[tuple[str, ScriptLine]]:
            if _is_it(name, value, batch, wanted):
                yield name, ScriptLine(f"{source.name}:{value.lineno}", text)

        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call):
                # Of a DataLoader that feeds the training the line is known: this is another.
                if not self.sites or _name(node.func) != _LOADER:
                    yield from self._arguments(source, node, batch, wanted)
            elif isinstance(node, ast.Dict):
                for entry in _entries_of(node):
                    yield from found(*entry)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    yield from found(_name(target), node.value, f"{source.text(target)} = {{}}")
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                head = f"{source.text(node.target)}: {source.text(node.annotation)}"
                yield from found(_name(node.target), node.value, f"{head} = {{}}")
            elif isinstance(node, ast.arguments):
                for name, value in _defaults(node):
                    yield from found(name, value, f"{name}={{}}")


def _unpacked(source: Source, call: ast.Call) -> Iterator[tuple[str, ScriptLine]]:
    """Settings of a DataLoader that come from a dictionary, where one place alone has each."""
    given = {keyword.arg for keyword in call.keywords}
    if None not in given:
        return
    places: dict[str, list[ScriptLine]] = {}
    for name, value, text in _entries(source):
        if name in LOADER_TUNABLES and name not in given:
            line = ScriptLine(f"{source.name}:{value.lineno}", text)
            places.setdefault(name, []).append(line)
    yield from ((name, lines[0]) for name, lines in places.items() if len(lines) == 1)


def _entries(source: Source) -> Iterator[tuple[str, ast.expr, str]]:
    """Entries of dictionaries: the key, the value, and how the entry is written."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Dict():
                yield from _entries_of(node)
            case ast.Call(func=ast.Name(id="dict") | ast.Attribute(attr="update"), keywords=words):
                yield from (
                    (word.arg, word.value, f"{word.arg}={{}}") for word in words if word.arg
                )
            case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value=str(key))) as target]):
                yield key, node.value, f"{source.text(target)} = {{}}"


def _entries_of(node: ast.Dict) -> Iterator[tuple[str, ast.expr, str]]:
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value, value, f'"{key.value}": {{}}'


def _names_of(call: ast.Call) -> set[str]:
    """Names that stand for the batch size among a call's arguments."""
    given = [keyword.value for keyword in call.keywords if _is_batch(keyword.arg or "")]
    if _name(call.func) == _LOADER and len(call.args) > 1:
        given.append(call.args[1])
    given += [argument for argument in call.args if _is_batch(_name(argument))]
    return {_name(each) for each in given} - {""}


def _defaults(node: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    by_place = [*node.posonlyargs, *node.args]
    index = len(by_place) - len(node.defaults)
    names = [each.arg for each in (*by_place[index:], *node.kwonlyargs)]
    for name, value in zip(names, (*node.defaults, *node.kw_defaults), strict=True):
        if value is not None:
            yield name, value


def _is_it(name: str, value: ast.expr, batch: int, wanted: set[str]) -> bool:
    if not isinstance(value, ast.Constant) or type(value.value) is not int:
        return False
    return value.value == batch and (_is_batch(name) or name in wanted)


def _is_batch(name: str) -> bool:
    return tunable_of(name) == "batch_size"


def _name(node: ast.expr) -> str:
    """The last name of an expression: of a variable, an attribute, an entry."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return ""
