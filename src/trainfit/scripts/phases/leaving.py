"""Loops that ask an iterator for a fixed number of batches: ``for _ in range(100): next(batches)``.

An epoch that is cut short would end before such a loop does, with a ``StopIteration`` that the
script never sees of its whole data set. It gets one batch more, and its loop is left at the next
of the loop's own lines. No file is changed.
"""

from __future__ import annotations

import ast
import dataclasses
import dis
import sys
from types import FrameType
from typing import Any, Final

from trainfit.scripts.phases.loops import (
    Loop,
    called,
    loops_around,
    tree_of,
    values_of,
)
from trainfit.simgpu.device.user_location import is_library, locals_of

#: Statements of a loop's own block at which it can be left: no context and no other loop is open.
_PLAIN: Final = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.If, ast.Delete)
_EXPECTED: Final = frozenset(("StopIteration", "Exception", "BaseException"))


@dataclasses.dataclass(frozen=True)
class _Left:
    """A loop that is to be left, in ``frame``, at one of ``lines``."""

    frame: FrameType
    loop: Loop
    lines: frozenset[int]


def leave_loop(frame: FrameType | None) -> bool:
    """Leave the loop around a call of ``next()`` in ``frame``, which goes on until then; ``False``:
    the call is to raise ``StopIteration``, which the script awaits, or it has no such loop."""
    try:
        left = _loop_to_leave(frame)
        if left is None:
            return False
        _watch(left)
    except Exception:  # the user's source and names
        return False
    return True


def _loop_to_leave(frame: FrameType | None) -> _Left | None:
    while frame is not None and not is_library(frame.f_code.co_filename):
        if dis.opname[frame.f_code.co_code[frame.f_lasti]] == "FOR_ITER":
            return None  # an iterator of the script's own: a loop ends with it
        tree = tree_of(frame.f_code.co_filename)
        if tree is None or _is_expected(tree, frame.f_lineno):
            return None
        loops = {loop.head[0]: loop for loop in loops_around(frame)}
        for node in ast.walk(tree):  # the outermost first
            if not isinstance(node, ast.For | ast.While) or node.lineno not in loops:
                continue
            if not _makes_iterator(node):
                loop = loops[node.lineno]
                lines = frozenset(plain.lineno for plain in node.body if isinstance(plain, _PLAIN))
                return _Left(frame, loop, lines) if _can_leave(frame, loop) else None
        if loops:
            return None
        frame = frame.f_back
    return None


def _is_expected(tree: ast.Module, line: int) -> bool:
    """Does the script handle the end at this line, by ``except`` or the default of ``next``?"""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and node.body[0].lineno <= line <= _end(node.body[-1]):
            kinds = [kind for handler in node.handlers for kind in _kinds(handler)]
            if any(kind in _EXPECTED for kind in kinds):
                return True
        if isinstance(node, ast.Call) and called(node) == "next" and len(node.args) > 1:
            is_there = node.lineno <= line <= (node.end_lineno or node.lineno)
            if is_there:
                return True
    return False


def _kinds(handler: ast.ExceptHandler) -> list[str]:
    if handler.type is None:
        return ["BaseException"]
    return [ast.unparse(node).rpartition(".")[2] for node in _each(handler.type)]


def _each(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _makes_iterator(node: ast.AST) -> bool:
    """Is an iterator made in the loop? Then it is a loop over epochs."""
    inside = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    return any(called(call) in ("iter", "__iter__") for call in inside)


def _can_leave(frame: FrameType, loop: Loop) -> bool:
    counts = loop.iterates is None and isinstance(values_of(loop, frame), range)
    return bool(loop.after) or counts or loop.calls in frame.f_code.co_names


def _watch(left: _Left) -> None:
    """Leave the loop at the next of its lines; what traces the script meanwhile is told of all
    others, and goes on after that."""
    before, everywhere = left.frame.f_trace, sys.gettrace()
    if everywhere is None:
        sys.settrace(_no_more)

    def line(frame: FrameType, event: str, given: Any) -> Any:
        if frame is not left.frame:
            return None
        is_line = event == "line"
        head = left.loop.head
        is_there = is_line and (frame.f_lineno in left.lines or frame.f_lineno in head)
        if not is_there and event != "return":
            return line
        if is_there:
            _leave(frame, left.loop)
        frame.f_trace = before
        if everywhere is None:
            sys.settrace(None)
        return before

    left.frame.f_trace = line


def _leave(frame: FrameType, loop: Loop) -> None:
    try:
        values = values_of(loop, frame)
        if loop.iterates is None and isinstance(values, range) and loop.take is not None:
            set_variables(frame, loop, values.stop)
            frame.f_lineno = loop.head[0]  # type: ignore[misc]  # of the frame that is traced
        elif loop.after:
            for each in loop.after:
                frame.f_lineno = each  # type: ignore[misc]
        else:
            gives_nothing(frame.f_globals, loop.calls)
            frame.f_lineno = loop.head[0]  # type: ignore[misc]  # it is made once more, of nothing
    except Exception:  # a line that cannot be gone to: the next batch ends it as it is
        return


def set_variables(frame: FrameType, loop: Loop, value: Any) -> None:
    """The variables of a loop, as if it had come to this value."""
    assert loop.take is not None
    before = {**frame.f_globals, **locals_of(frame), "_trainfit_value": value}
    names = dict(before)
    exec(loop.take, names)
    names.pop("__builtins__", None)
    changed = {name: made for name, made in names.items() if made is not before.get(name)}
    frame.f_locals.update(changed)


def gives_nothing(names: dict[str, Any], name: str) -> None:
    """The next call of the function ``name`` gives nothing to go over."""
    missing = object()
    before = names.get(name, missing)

    def once(*args: Any, **kwargs: Any) -> tuple[()]:
        if before is missing:
            del names[name]
        else:
            names[name] = before
        return ()

    names[name] = once


def _no_more(frame: FrameType, event: str, given: Any) -> None:
    """No calls are traced but those that were begun before."""
