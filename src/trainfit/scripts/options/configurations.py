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
        yield _option(name, name, value, given=name in given)


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
        yield _option(f"--{name}", name, value, given=name in said)


def _option(flag: str, name: str, value: Any, *, given: bool) -> ScriptOption:
    """What it has without being given is not told where it is."""
    text = text_of(value)
    return ScriptOption((flag,), name, text, given=given, default=None if given else text)


def _reads_as(text: str, value: Any) -> bool:
    if text == str(value):
        return True
    try:
        return bool(ast.literal_eval(text) == value)
    except (ValueError, SyntaxError):
        return False


def _plain_values(config: Any, before: str) -> Iterator[tuple[str, Any]]:
    for key in config:
        node = config._get_node(key) if isinstance(key, str) else None
        if node is None or node._is_interpolation() or node._is_missing():
            continue
        value = config[key]
        if is_plain(value):
            yield before + key, value
        elif hasattr(value, "keys"):
            yield from _plain_values(value, f"{before}{key}.")
