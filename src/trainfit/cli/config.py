"""Defaults of options from ``trainfit.toml``, or ``[tool.trainfit]`` of ``pyproject.toml``.

The nearest of both counts, from the working directory upwards. Its keys are long names of options,
for every verb that has them; a table of a verb's name has those of that verb alone, and goes before
them. What the command line says goes before both.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import stat
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from trainfit.cli.common import file_path
from trainfit.results.files.errors import TrainfitError
from trainfit.results.text import printable

#: A file to read instead; empty: none.
VARIABLE: Final = "TRAINFIT_CONFIG"
_OWN, _PROJECT = "trainfit.toml", "pyproject.toml"
#: Options that a file may not set: a project that was cloned must not lift the protection of files,
#: nor change the system.
_TYPED_ONLY: Final = ("allow-writes", "fix", "undo")
_NEVER: Final = ("help", "version", *_TYPED_ONLY)
#: Values of options that name a file, and are none.
_NO_FILES: Final = ("-", "gpuhunt")


class ConfigError(TrainfitError):
    """A file of defaults that cannot be read, or says what no option is."""


class _Config(NamedTuple):
    path: Path
    values: Mapping[str, Any]


class _Given(NamedTuple):
    """A default: its key as it is written, and the option that it is of."""

    key: str
    action: argparse.Action
    value: Any


def use_config(
    parser: argparse.ArgumentParser,
    verb: str,
    words: Sequence[str],
    verbs: Collection[str],
    parser_of: Callable[[str], argparse.ArgumentParser],
) -> None:
    """Make the file's values for ``verb`` the defaults of its ``parser``, and name them on stderr.

    Args:
        words: our options on the command line; what they give is no matter of the file.
        verbs: all names of verbs.
        parser_of: the parser of another verb, asked for keys that this one lacks.

    Raises:
        ConfigError: a key that no option has, or a value that its option would not take.
    """
    config = _found(Path.cwd())
    if config is None:
        return
    typed = {word.partition("=")[0] for word in words}
    given = {
        each.action.dest: each
        for each in _of_verb(config, parser, verb, verbs, parser_of)
        if not _is_typed(parser, each.action, typed)
    }
    parser.set_defaults(**{dest: each.value for dest, each in given.items()})
    if given:
        named = ", ".join(each.key for each in given.values())
        print(f"trainfit: {printable(named)} from {_shown(config.path)}", file=sys.stderr)


def defaults_text() -> str:
    """What the file says that counts here, in a form that changes only with that; empty: none."""
    config = _found(Path.cwd())
    return "" if config is None else json.dumps(config.values, sort_keys=True, default=str)


def _found(folder: Path) -> _Config | None:
    if VARIABLE in os.environ:
        named = os.environ[VARIABLE]
        return _read(Path(named)) if named else None
    for each in (folder, *folder.parents):
        for name in (_OWN, _PROJECT):
            path = each / name
            if path.is_file() and not _is_planted(path):
                config = _read(path)
                if config is not None:
                    return config
    return None


def _is_planted(path: Path) -> bool:
    """Is it another user's file where everyone may put one, as in /tmp? It is left alone, with a
    line on stderr."""
    owner, open_to_all = path.stat().st_uid, path.parent.stat().st_mode & stat.S_IWOTH
    if not open_to_all or owner in (0, os.getuid()):
        return False
    print(f"trainfit: {_shown(path)} is not read: another user put it there", file=sys.stderr)
    return True


def _read(path: Path) -> _Config | None:
    """``None``: a project's file that says nothing of trainfit."""
    is_own = path.name != _PROJECT
    try:
        content = path.read_bytes()
        if not is_own and b"trainfit" not in content:
            return None
        document: Any = tomllib.loads(content.decode("utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{_shown(path)}: {printable(reason)}; correct it, or leave it out by {VARIABLE}="
        ) from error
    if not is_own:
        tools = document.get("tool")
        document = tools.get("trainfit") if isinstance(tools, dict) else None
    if document is not None and not isinstance(document, dict):
        raise ConfigError(f"{_shown(path)}: tool.trainfit: expected a table of options")
    return None if document is None else _Config(path, document)


def _of_verb(
    config: _Config,
    parser: argparse.ArgumentParser,
    verb: str,
    verbs: Collection[str],
    parser_of: Callable[[str], argparse.ArgumentParser],
) -> Iterator[_Given]:
    """The options of all verbs first, without those that the verb's own table is about."""
    common = {key: value for key, value in config.values.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in config.values.items() if key not in common}
    for name in tables:
        if name not in verbs:
            raise ConfigError(f"{_shown(config.path)}: {_unknown(f'[{name}]', name, verbs)}")
    own, options = tables.get(verb, {}), _options(parser)
    others: set[str] = set()
    for key in common:
        if _name(key) not in options and _name(key) not in others:
            others = {name for each in verbs for name in _options(parser_of(each))}
            if _name(key) not in others:
                raise ConfigError(f"{_shown(config.path)}: {_unknown(repr(key), key, others)}")
    for key in own:
        if _name(key) not in options:
            where = f"{key!r} in [{verb}]"
            raise ConfigError(f"{_shown(config.path)}: {_unknown(where, key, options)}")
    decided = [options[_name(key)] for key in own]
    for key, value in common.items():
        action = options.get(_name(key))
        if action is not None and not any(_excludes(parser, action, option) for option in decided):
            yield _Given(key, action, _typed(config.path, key, action, value))
    for key, value in own.items():
        action = options[_name(key)]
        clash = [
            option
            for option in decided
            if option is not action and _excludes(parser, action, option)
        ]
        if clash:
            other = clash[0].option_strings[-1].removeprefix("--")
            raise ConfigError(f"{_shown(config.path)}: [{verb}] has {key} and {other}: keep one")
        yield _Given(key, action, _typed(config.path, key, action, value))


def _options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options by their long names, without those that begin with "no-" for a switch."""
    return {
        option.removeprefix("--"): action
        for action in parser._actions
        for option in action.option_strings[: 1 if _is_switch(action) else None]
        if option.startswith("--") and option.removeprefix("--") not in _NEVER
    }


def _is_switch(action: argparse.Action) -> bool:
    return isinstance(action, argparse.BooleanOptionalAction)


def _name(key: str) -> str:
    return key.replace("_", "-")


def _excludes(
    parser: argparse.ArgumentParser, one: argparse.Action, other: argparse.Action
) -> bool:
    """Are they one option, or may only one of them be given?"""
    groups = (group._group_actions for group in parser._mutually_exclusive_groups)
    return one is other or any(one in group and other in group for group in groups)


def _is_typed(parser: argparse.ArgumentParser, action: argparse.Action, typed: set[str]) -> bool:
    return any(
        _excludes(parser, action, each) and not typed.isdisjoint(each.option_strings)
        for each in parser._actions
    )


def _typed(path: Path, key: str, action: argparse.Action, value: Any) -> Any:
    """The value as the option would have it from the command line."""
    try:
        return _value(path.parent, action, value)
    except (argparse.ArgumentTypeError, TrainfitError, ValueError, TypeError) as error:
        raise ConfigError(f"{_shown(path)}: {key} = {value!r}: {error}") from None


def _value(folder: Path, action: argparse.Action, value: Any) -> Any:
    if action.nargs == 0 or _is_switch(action):
        if not isinstance(value, bool):
            raise ValueError("expected true or false")
        return value if _is_switch(action) or value else action.default
    if action.nargs == "?" and isinstance(value, bool):
        return action.const if value else action.default
    if isinstance(action, argparse._AppendAction) or action.nargs in ("+", "*"):
        each = value if isinstance(value, list) else [value]
        return [_single(folder, action, one) for one in each]
    if isinstance(value, list) and str(action.metavar).endswith((",…", "NAMES")):
        value = ",".join(map(_text, value))
    return _single(folder, action, value)


def _single(folder: Path, action: argparse.Action, value: Any) -> Any:
    text = _text(value)
    if (action.metavar in ("FILE", "DIR") or action.type is file_path) and text not in _NO_FILES:
        placed = folder / Path(text).expanduser()
        text = text if folder == Path.cwd() and placed == folder / text else str(placed)
    found = action.type(text) if callable(action.type) else text
    if action.choices is not None and found not in action.choices:
        raise ValueError(f"expected one of {', '.join(map(str, action.choices))}")
    return found


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("expected a string or a number")
    return str(value)


def _unknown(what: str, key: str, known: Collection[str]) -> str:
    if _name(key) in _TYPED_ONLY:
        return f"{printable(what)} is for the command line alone; leave it out here"
    near = difflib.get_close_matches(_name(key), known, 1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown key {printable(what)}{meant} (keys are names of options, tables of verbs)"


def _shown(path: Path) -> str:
    """The path as short as it can be told from here."""
    relative = os.path.relpath(path)
    return printable(relative if len(relative) < len(str(path)) else str(path))
