"""How many epochs a script's own loop has: ``for epoch in range(args.epochs):``.

The loops around the line that is running are found in the source, and their ranges are evaluated
where the script runs: no more than names, numbers and calls of ``range`` and ``len``.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

from trainfit.simgpu.device.user_location import is_library, locals_of

_PLAIN: Final = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.operator, ast.Load, ast.Call),
    *(ast.UnaryOp, ast.unaryop, ast.keyword, ast.Subscript),
)
_CALLED: Final = ("range", "len", "int", "min", "max")
#: Progress bars, whose first argument is the range.
_BARS: Final = ("tqdm", "track")
_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def epochs_of(frame: FrameType | None) -> int | None:
    """Rounds of the loops around the one that goes over the data, which ``frame`` is within.

    ``None``: the data's loop is in none of the script's lines, or one around it has no known end.
    """
    frames: list[FrameType] = []
    while frame is not None:
        if not is_library(frame.f_code.co_filename) and frame.f_code.co_name != "<lambda>":
            frames.append(frame)
        frame = frame.f_back
    counts: list[int] = []
    for each in reversed(frames):
        for loop in _around(each):
            if loop is None:
                return None
            rounds = _rounds(loop, each)
            if rounds is None:
                return math.prod(counts)
            counts.append(rounds)
    return None


def _rounds(loop: CodeType, frame: FrameType) -> int | None:
    try:
        over = eval(loop, frame.f_globals, locals_of(frame))
    except Exception:  # the user's names
        return None
    return len(over) if isinstance(over, range) else None


def _around(frame: FrameType) -> Iterator[CodeType | None]:
    """What each loop around the frame's line goes over, the outermost first; ``None``: a
    ``while``."""
    line, scopes = frame.f_lineno, _loops(frame.f_code.co_filename)
    within = [scope for scope in scopes if scope[0] <= line <= scope[1]]
    if within:
        loops = max(within, key=lambda scope: scope[0])[2]
        yield from (over for first, last, over in loops if first <= line <= last)


_Loops = tuple[tuple[int, int, CodeType | None], ...]


@functools.cache
def _loops(filename: str) -> tuple[tuple[int, int, _Loops], ...]:
    """Of each scope of a source file, its first line and its last, and its loops."""
    try:
        tree = ast.parse(Path(filename).read_bytes(), filename)
    except (OSError, SyntaxError, ValueError):
        return ()
    found = [(1, len(Path(filename).read_bytes().splitlines()), tuple(_within(tree, filename)))]
    for node in ast.walk(tree):
        if isinstance(node, _SCOPES):
            found.append((node.lineno, node.end_lineno or 0, tuple(_within(node, filename))))
    return tuple(found)


def _within(scope: ast.AST, filename: str) -> Iterator[tuple[int, int, CodeType | None]]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, _SCOPES):
            continue
        if isinstance(node, ast.For | ast.While):
            last = node.body[-1].end_lineno or 0
            over = _code(node.iter, filename) if isinstance(node, ast.For) else None
            yield node.body[0].lineno, last, over
        yield from _within(node, filename)


def _code(over: ast.expr, filename: str) -> CodeType:
    """Gives a range, if it is one; anything else otherwise."""
    if isinstance(over, ast.Call) and over.args:
        name = getattr(over.func, "id", getattr(over.func, "attr", ""))
        if name in _BARS:
            over = over.args[0]
    calls = [each.func for each in ast.walk(over) if isinstance(each, ast.Call)]
    plain = all(isinstance(each, _PLAIN) for each in ast.walk(over))
    if not plain or any(getattr(each, "id", "") not in _CALLED for each in calls):
        over = ast.Constant(None)
    return compile(ast.fix_missing_locations(ast.Expression(over)), filename, "eval")
