"""Does a script switch its model to evaluation in its loop, and never back in it?

By names alone, over all of the script's files: it says whether a run has to look, no more.
"""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from trainfit.lint.imports import NEAREST_CHARACTERS, Source, UnreadableError, read_files

_LOOPS: Final = (ast.For, ast.While)
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


class _Switches(NamedTuple):
    """What some lines switch a model to, and what they call, by the last part of its name."""

    to_evaluation: bool
    to_training: bool
    calls: frozenset[str]


def may_stay_in_evaluation(path: Path, ran: Collection[str] = ()) -> bool:
    """Whether a loop of the script, or what it calls, has ``eval()`` and no ``train()``. Where the
    files that a run ``ran`` are known, of these alone. A script that cannot be read has none."""
    try:
        files, _ = read_files(path, NEAREST_CHARACTERS)
    except UnreadableError:
        return False
    known = [file.source for file in files if not ran or os.path.realpath(file.source.path) in ran]
    sources = known or [files[0].source]
    if not any(".eval()" in line for source in sources for line in source.lines):
        return False
    functions = _functions(sources)
    for source in sources:
        for node in source.nodes:
            if isinstance(node, _LOOPS):
                switches = _with_calls(_of(node), functions)
                if switches.to_evaluation and not switches.to_training:
                    return True
    return False


def _functions(sources: Iterable[Source]) -> dict[str, list[_Switches]]:
    functions: dict[str, list[_Switches]] = defaultdict(list)
    for source in sources:
        for node in source.nodes:
            if isinstance(node, _FUNCTIONS):
                functions[node.name].append(_of(node))
    return functions


def _of(node: ast.AST) -> _Switches:
    to_evaluation = to_training = False
    calls = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and each.attr == "training":
            to_training |= isinstance(each.ctx, ast.Store)
        if not isinstance(each, ast.Call):
            continue
        if isinstance(each.func, ast.Attribute):
            name = each.func.attr
            to_evaluation |= name == "eval" and not each.args
            to_training |= name == "train"
        else:
            name = getattr(each.func, "id", "")
        calls.add(name)
    return _Switches(to_evaluation, to_training, frozenset(calls))


def _with_calls(switches: _Switches, functions: dict[str, list[_Switches]]) -> _Switches:
    """… with those of all that is called."""
    to_evaluation, to_training, calls = switches
    seen, left = set(calls), list(calls)
    while left:
        for each in functions.get(left.pop(), ()):
            to_evaluation |= each.to_evaluation
            to_training |= each.to_training
            left += each.calls - seen
            seen |= each.calls
    return _Switches(to_evaluation, to_training, frozenset(seen))
