"""Values that words of a command line override: in a configuration, as Hydra's, or in the script's
global variables, as nanoGPT's.

As in :mod:`trainfit.scripts.options.parsers` they may raise whatever what they look at raises.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainfit.results.runs.script_option import ScriptOption
from trainfit.scripts.options.values import is_plain, text_of


def of_omegaconf(config: Any, words: Sequence[str]) -> Iterator[ScriptOption]:
    """The plain values of an OmegaConf ``config`` by their dotted names, which words such as
    ``data.batch_size=8`` override. What refers to another value (``${...}``) follows that one."""
    # "+name=value" and "++name=value" say it, too; whoever writes words finds those by themselves.
    given = {word.partition("=")[0].lstrip("+") for word in words if "=" in word}
    for name, value in _plain_values(config, ""):
        text = text_of(value)
        default = None if name in given else text
        yield ScriptOption((name,), name, text, given=name in given, default=default)


def of_globals(variables: Mapping[str, Any], words: Sequence[str]) -> Iterator[ScriptOption]:
    """A script's global ``variables`` where its ``words`` override them, as those of nanoGPT do:
    ``--name=value`` is such a variable with that value, or a word is a Python file, which is run
    for its assignments."""
    plain = {
        name: value
        for name, value in variables.items()
        if not name.startswith("_") and value is not None and is_plain(value)
    }
    said = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
    overrides = any(name in plain and _reads_as(said[name], plain[name]) for name in said)
    if not overrides and not any(word.endswith(".py") for word in words):
        return
    for name, value in plain.items():
        text = text_of(value)
        default = None if name in said else text
        yield ScriptOption((f"--{name}",), name, text, given=name in said, default=default)


def _reads_as(text: str, value: Any) -> bool:
    if text == str(value):
        return True
    try:
        return bool(ast.literal_eval(text) == value)
    except (ValueError, SyntaxError):
        return False


def _plain_values(config: Any, before: str) -> Iterator[tuple[str, Any]]:
    for key in config:
        if not isinstance(key, str) or config._get_node(key)._is_interpolation():
            continue
        if config._get_node(key)._is_missing():
            continue
        value = config[key]
        if is_plain(value):
            yield before + key, value
        elif hasattr(value, "keys"):
            yield from _plain_values(value, f"{before}{key}.")
