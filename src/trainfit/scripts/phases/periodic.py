"""Lets what a script does every so many steps happen once, within the few that are simulated.

``if step % 500 == 0: evaluate()`` and ``if epoch == 5: unfreeze()`` come late in a run, and need
memory that no step before does. The condition is found in the script's source as its line is
reached; where all else in it holds, the script goes on with the body, as if the step's number were
right. No file is changed.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, Final

from trainfit.scripts.phases.loops import tree_of
from trainfit.simgpu.device.user_location import is_library, untrace

#: Loops of libraries that are looked at like the user's own.
_LOOPS: Final = ("/transformers/trainer_callback.py",)
_LOOPING: Final = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
#: Words in the name of how many epochs there are.
_TOTALS: Final = frozenset(("max", "min", "num", "n", "total", "start", "last", "best"))

_Trace = Callable[[FrameType, str, Any], Any]


@dataclasses.dataclass(frozen=True)
class PeriodicBlock:
    """An ``if`` at ``line`` with a remainder in its condition, or the number of an epoch.

    ``condition`` is the same without it, ``number`` the steps that it divides by (the epoch),
    ``target`` the line to go on with, and ``first`` to ``last`` the lines of what comes then, whose
    code is ``body`` where it stands on the line of the condition (``None``: it does not).
    ``of_epoch`` says that it is an epoch's number.
    """

    line: int
    original: CodeType
    condition: CodeType
    number: CodeType
    target: int
    first: int
    last: int
    body: CodeType | None = None
    of_epoch: bool = False


class PeriodicWork:
    """A watch that enters each periodic block of the running script once, from :meth:`begin` on.

    Nothing that goes wrong in it reaches the script.
    """

    def __init__(self) -> None:
        self.entered: list[str] = []
        """Lines ("file:line") of blocks that were entered before their time."""
        self.later: str | None = None
        """The first of them that comes with a later epoch."""
        self._done: set[tuple[str, int]] = set()
        self._stepping: set[tuple[str, int]] = set()
        self._is_on = False

    def begin(self) -> None:
        """Begin within the script's call that ends a step; nothing where its calls are traced
        already."""
        if self._is_on or sys.gettrace() is not None:
            return
        self._is_on = True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if _is_looked_at(frame.f_code.co_filename):
                self._stepping.add((frame.f_code.co_filename, frame.f_lineno))
                if blocks_of(frame.f_code.co_filename):
                    frame.f_trace = self._line
            frame = frame.f_back
        sys.settrace(self._call)

    def end(self) -> None:
        """The script runs as it is again."""
        if self._is_on:
            self._is_on = False
            sys.settrace(None)
            untrace(sys._getframe(1), self._line)

    def _call(self, frame: FrameType, event: str, given: Any) -> _Trace | None:
        name = frame.f_code.co_filename
        return self._line if _is_looked_at(name) and blocks_of(name) else None

    def _line(self, frame: FrameType, event: str, given: Any) -> _Trace | None:
        if not self._is_on:
            return None
        if event == "line":
            name = frame.f_code.co_filename
            block = blocks_of(name).get(frame.f_lineno)
            if block is not None and (name, block.line) not in self._done:
                self._enter(frame, name, block)
        return self._line

    def _enter(self, frame: FrameType, name: str, block: PeriodicBlock) -> None:
        if any(file == name and block.first <= line <= block.last for file, line in self._stepping):
            return  # the optimizer's step is in it: accumulation
        spaces = frame.f_globals, frame.f_locals
        try:
            number = eval(block.number, *spaces)
            if type(number) is not int or number < 2 or not eval(block.condition, *spaces):
                return
            self._done.add((name, block.line))
            if eval(block.original, *spaces):
                return
            if block.body is None:
                frame.f_lineno = block.target  # type: ignore[misc]  # of the frame that is traced
            self.entered.append(f"{name}:{block.line}")
            if block.of_epoch:
                self.later = self.later or self.entered[-1]
        except Exception:  # the user's expressions, and lines that cannot be gone to
            self._done.add((name, block.line))
            return
        if block.body is not None:  # what it raises is the script's
            exec(block.body, *spaces)


@functools.cache
def _is_looked_at(filename: str) -> bool:
    return not is_library(filename) or filename.replace("\\", "/").endswith(_LOOPS)


@functools.cache
def blocks_of(filename: str) -> dict[int, PeriodicBlock]:
    """The periodic blocks of a source file, by line; none where it cannot be read."""
    tree = tree_of(filename)
    if tree is None:
        return {}
    found: dict[int, PeriodicBlock] = {}
    written_out = _WrittenOut(tree)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                blocks = _blocks(statements, filename, written_out)
                found |= {block.line: block for block in blocks}
    return found


def _blocks(
    statements: Sequence[ast.stmt], filename: str, written_out: _WrittenOut
) -> Iterator[PeriodicBlock]:
    for place, node in enumerate(statements):
        if not isinstance(node, ast.If) or _has(node.test, (ast.NamedExpr, ast.Await, ast.Yield)):
            continue
        swapped = _WithoutRemainder()
        test = swapped.visit(written_out.visit(ast.parse(ast.unparse(node.test), mode="eval")))
        if len(swapped.numbers) != 1:
            continue
        after = statements[place + 1 :]
        taken: Sequence[ast.stmt] = node.body
        if swapped.is_inverted:
            # ``if step % 500: continue``: what comes after it is periodic.
            if not isinstance(node.body[-1], ast.Continue | ast.Return) or not after:
                continue
            test, taken = ast.Expression(ast.UnaryOp(ast.Not(), test.body)), after
        elif any(map(_leaves, taken)):
            continue
        last = taken[-1].end_lineno or taken[-1].lineno
        yield PeriodicBlock(
            node.lineno,
            _code(_as_taken(node.test, inverted=swapped.is_inverted), filename),
            _code(test, filename),
            _code(ast.Expression(swapped.numbers[0]), filename),
            taken[0].lineno,
            taken[0].lineno,
            last,
            _statements(taken, filename) if taken[0].lineno == node.lineno else None,
            swapped.is_of_epoch,
        )


def _leaves(node: ast.AST) -> bool:
    """May the script not go on with its steps after this statement?"""
    if isinstance(node, ast.Break | ast.Return | ast.Raise):
        return True
    if isinstance(node, _FUNCTIONS):
        return False
    inner = filter(_leaves, ast.iter_child_nodes(node))
    if isinstance(node, _LOOPING):  # a break of its own
        return any(not isinstance(each, ast.Break) and _leaves_loop(each) for each in inner)
    return any(True for _ in inner)


def _leaves_loop(node: ast.AST) -> bool:
    """Does it leave the loop by more than a ``break``?"""
    return any(isinstance(each, ast.Return | ast.Raise) for each in ast.walk(node))


def _statements(taken: Sequence[ast.stmt], filename: str) -> CodeType:
    return compile(ast.Module(list(taken), []), filename, "exec")


def _as_taken(test: ast.expr, *, inverted: bool) -> ast.Expression:
    found = ast.parse(ast.unparse(test), mode="eval")
    return ast.Expression(ast.UnaryOp(ast.Not(), found.body)) if inverted else found


def _has(node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
    return any(isinstance(each, kinds) for each in ast.walk(node))


def _code(expression: ast.Expression, filename: str) -> CodeType:
    return compile(ast.fix_missing_locations(expression), filename, "eval")


class _WrittenOut(ast.NodeTransformer):
    """Has what functions of the file return in place of their calls, where that is a remainder of
    their arguments: ``divisible_by(step, 1000)``."""

    def __init__(self, tree: ast.Module) -> None:
        self._functions: dict[str, tuple[list[str], str]] = {}
        for node in tree.body:
            match node:
                case ast.FunctionDef(body=[*_, ast.Return(value=ast.expr() as value)]):
                    body = node.body[:-1]  # a docstring
                    if all(isinstance(each, ast.Expr) for each in body) and _tests_remainder(value):
                        names = [argument.arg for argument in node.args.args]
                        self._functions[node.name] = names, ast.unparse(value)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        names, value = self._functions.get(getattr(node.func, "id", ""), ([], ""))
        given = dict(zip(names, node.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg in names}
        if not value or len(given) < len(names):  # a default: the function's own namespace has it
            return self.generic_visit(node)
        inner = ast.parse(value, mode="eval").body
        return _Filled(given).visit(inner)  # type: ignore[no-any-return]


class _Filled(ast.NodeTransformer):
    """Has arguments in place of a function's parameters."""

    def __init__(self, given: Mapping[str, ast.expr]) -> None:
        self._given = given

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._given.get(node.id, node)


def _tests_remainder(node: ast.expr) -> bool:
    """``a % b == 0`` of plain names, ``not a % b``."""
    names = (ast.Name, ast.BinOp, ast.Compare, ast.UnaryOp, ast.Constant, ast.Load)
    kinds = (*names, ast.operator, ast.cmpop, ast.unaryop)
    inside = list(ast.walk(node))
    return all(isinstance(each, kinds) for each in inside) and any(
        isinstance(each, ast.expr) and _is_remainder(each) for each in inside
    )


class _WithoutRemainder(ast.NodeTransformer):
    """Takes a comparison of a remainder to be as it is once in a while; ``numbers`` are what is
    divided by, ``is_inverted`` says that it is false then."""

    def __init__(self) -> None:
        self.numbers: list[ast.expr] = []
        self.is_inverted = self.is_of_epoch = False

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if isinstance(node.op, ast.Not) and _is_remainder(node.operand):
            return self._once(node.operand, holds=True)
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        match node.ops:
            case [ast.Eq() | ast.NotEq() | ast.Gt()] if _is_remainder(node.left):
                return self._once(node.left, holds=isinstance(node.ops[0], ast.Eq))
            case [ast.Eq() | ast.Gt() | ast.GtE()] if _counts_epochs(node.left):
                self.numbers.append(node.comparators[0])
                self.is_of_epoch = True
                return ast.Constant(True)
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if _is_remainder(node):
            return self._once(node, holds=False)
        return self.generic_visit(node)

    def _once(self, remainder: ast.expr, *, holds: bool) -> ast.AST:
        assert isinstance(remainder, ast.BinOp)
        self.numbers.append(remainder.right)
        self.is_inverted |= not holds
        return ast.Constant(holds)


def _counts_epochs(node: ast.expr) -> bool:
    """``epoch``, ``self.current_epoch``; not ``args.epochs`` or ``max_epoch``, which stay."""
    words = getattr(node, "id", getattr(node, "attr", "")).lower().split("_")
    return "epoch" in words and not _TOTALS.intersection(words)


def _is_remainder(node: ast.expr) -> bool:
    """``step % every``; a text with ``%`` is none."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mod):
        return False
    return not isinstance(node.left, ast.JoinedStr) and not (
        isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
    )
