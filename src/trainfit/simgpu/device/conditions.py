"""What the script does with a truth value or a number of the GPU that nobody knows.

A check passes, a stopping condition does not hold yet, a guard clause is not taken: so a healthy
run goes. Which answer leads there follows from the statement that asks. Python's instructions tell
where in the source it stands; ``not``, ``and`` and ``or`` in between, and a function that returns
the answer, are followed.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import math
import os
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

import torch

from trainfit.findings.source_code import file_syntax
from trainfit.simgpu.device.user_location import locals_of

Kind = Literal["check", "stop", "guard"]
#: Rounds after which a loop ends that nothing but unknown data ends, and that makes no steps.
ROUNDS = 32
#: How many functions may return the answer to each other.
_DEPTH = 8

_LIBRARY = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, os.path.dirname(os.path.dirname(__file__)))
)
#: Functions that fail unless what they are given is true.
_CHECKS = {
    "_assert", "_check", "_check_index", "_check_value", "_check_type", "_check_not_implemented",
    "assertTrue", "assert_",
}  # fmt: skip
#: Instructions that ask for a truth value, and those between one and the value's own.
_TESTS = {"TO_BOOL", "UNARY_NOT"}
_BETWEEN = {"CACHE", "COPY", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "TO_BOOL"}
_KEEP_TRUTH = {"all", "any", "bool", "int"}
_JUMPS = (ast.Raise, ast.Return, ast.Break, ast.Continue)
_ENDS = {"exit", "_exit", "quit", "abort"}


class Condition(NamedTuple):
    """A statement that depends on a value.

    Its ``test`` is to be ``holds``, and what is ``asked`` for, a part of it, is to be ``wanted``
    (where that is a truth value). ``frame`` is where it is evaluated; ``endless`` says that the
    loop that it is to end has no other end.
    """

    kind: Kind
    wanted: bool
    test: ast.expr
    asked: ast.expr
    holds: bool
    frame: FrameType
    endless: bool

    @property
    def place(self) -> tuple[str, int, int]:
        """What tells this condition from others."""
        return self.frame.f_code.co_filename, self.test.lineno, self.test.col_offset


def condition(of_number: bool = False) -> Condition | None:
    """What depends on the truth value, or the number, that the script asks for now; ``None``:
    that is not seen."""
    frame: FrameType | None = _script(sys._getframe(1))
    value = True
    compared: tuple[ast.expr, ast.expr, FrameType] | None = None
    for _ in range(_DEPTH):
        if frame is None:
            return None
        source = _source(frame.f_code.co_filename)
        part = None if source is None else source.asked(frame.f_code, frame.f_lasti)
        if source is None or part is None:
            return None
        node, flipped = part
        found = source.statement(node, value is not flipped, of_number)
        if found is None:
            return None
        statement, value, top = found
        keeps = isinstance(statement, ast.Return | ast.Lambda | ast.Assign)
        if keeps and of_number and top is not node and isinstance(top, ast.expr):
            # What is kept is the comparison.
            compared, of_number, value = (top, node, frame), False, True
        if isinstance(statement, ast.Return | ast.Lambda):
            frame = _script(frame.f_back)
            continue
        result = source.judge(statement, value, top, node, frame, of_number)
        if result is None or compared is None:
            return result
        test, asked, frame = compared
        return result._replace(test=test, asked=asked, frame=frame, holds=result.wanted)
    return None


def slice_end() -> int | None:
    """The size of the dimension that the script slices up to the number that it asks for now, as in
    ``x[:, :n]`` or ``x[: n.item()]``; ``None``: it does something else, or slices from a place that
    is not known."""
    frame = _script(sys._getframe(1))
    source = None if frame is None else _source(frame.f_code.co_filename)
    return None if frame is None or source is None else source.slice_end(frame)


class Rounds:
    """Counts how often loops go on that nothing but unknown data ends."""

    def __init__(self) -> None:
        self._counts: dict[Any, tuple[int, int]] = {}
        self.most = ROUNDS

    def over(self, condition: Condition, step: int) -> bool:
        """Has it been round often enough, within a step? Then counting starts again."""
        before, count = self._counts.get(condition.place, (step, 0))
        count = count + 1 if before == step else 1
        ends = count > self.most
        self._counts[condition.place] = (step, 0 if ends else count)
        return ends


def _script(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        frame = frame.f_back
    return frame


class _Source:
    """The syntax tree of a file, by place."""

    def __init__(self, tree: ast.Module) -> None:
        self._parents: dict[ast.AST, ast.AST] = {}
        self._nodes: dict[tuple[Any, ...], ast.expr] = {}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node
            if isinstance(node, ast.expr):
                place = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
                self._nodes[place] = node

    def asked(self, code: CodeType, at: int) -> tuple[ast.expr, bool] | None:
        """The expression whose truth an instruction asks for, and is it the opposite?"""
        name = dis.opname[code.co_code[at]]
        if "JUMP" in name or name in _TESTS:
            # It tests what the instruction before it left; its own place may be the statement's.
            at -= 2
            while at > 0 and dis.opname[code.co_code[at]] in _BETWEEN:
                at -= 2
        node = self._nodes.get(_positions(code)[at // 2])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node = node.operand  # a comparison that was joined with its test
        inverts = isinstance(node, ast.Compare) and isinstance(node.ops[-1], ast.NotIn)
        return None if node is None else (node, inverts and name.startswith("CONTAINS"))

    def slice_end(self, frame: FrameType) -> int | None:
        """The size of the dimension that the script slices up to, by the instruction at which
        ``frame`` is (see the function :func:`slice_end`)."""
        node: ast.AST | None = self._nodes.get(_positions(frame.f_code)[frame.f_lasti // 2])
        if isinstance(node, ast.Call) and _name_of(node) in ("item", "int"):
            node = self._parents.get(node)  # the slice that it is the end of
            while isinstance(node, ast.Slice | ast.Tuple):
                node = self._parents.get(node)
        if not isinstance(node, ast.Subscript):
            return None
        owner = _held(node.value, frame)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        ends = [
            place
            for place, part in enumerate(parts)
            if isinstance(part, ast.Slice) and not _is_plain(part.upper, frame)
        ]
        others: list[ast.expr | None] = []
        for part in parts:
            others += [part.lower, part.step] if isinstance(part, ast.Slice) else [part]
        plain = all(_is_plain(each, frame) for each in others)
        if len(ends) != 1 or not plain or not isinstance(owner, torch.Tensor):
            return None
        return _size_at(owner, parts, ends[0], frame)

    def statement(
        self, node: ast.expr, value: bool, of_number: bool
    ) -> tuple[ast.AST, bool, ast.AST] | None:
        """The statement that ``node`` decides on, what ``node`` being true makes of its
        expression, and that expression; a call of a checking function counts as a statement."""
        child: ast.AST = node
        if isinstance(node, ast.Call) and _name_of(node) in _CHECKS and node.args:
            return node, value, node.args[0]
        while True:
            parent = self._parents.get(child)
            match parent:
                case None:
                    return None
                case ast.stmt() | ast.Lambda():
                    return parent, value, child
                case ast.UnaryOp(op=ast.Not()):
                    value = not value
                case ast.Compare() | ast.BinOp() | ast.UnaryOp() if of_number:
                    pass
                case ast.Compare():
                    against = _constant(parent, child)
                    if against is None:
                        return None
                    value = value is against
                case ast.Call(func=func):
                    if child is func:
                        return None
                    name = _name_of(parent)
                    if name in _CHECKS and parent.args[:1] == [child]:
                        return parent, value, child
                    if name not in _KEEP_TRUTH and not (of_number and name in _FUNCTIONS):
                        return None
                case ast.IfExp(test=test) if test is child:
                    return None
                case ast.GeneratorExp() | ast.ListComp() | ast.BoolOp() | ast.IfExp():
                    pass
                case ast.NamedExpr():
                    pass
                case _:
                    return None
            assert parent is not None
            child = parent

    def judge(
        self,
        statement: ast.AST,
        value: bool,
        top: ast.AST,
        asked: ast.expr,
        frame: FrameType,
        of_number: bool,
    ) -> Condition | None:
        """What a statement does with the value of its expression ``top``."""
        kind: Kind = "check"
        holds, endless = True, False
        match statement:
            case ast.Call():
                pass
            case ast.Assert(test=test) if test is top:
                pass
            case ast.While(test=test) if test is top:
                kind, endless = "stop", True
            case ast.If(test=test, body=body, orelse=orelse) if test is top:
                way = self._way(statement, body) or self._way(statement, orelse)
                if way is None:
                    return None
                kind, endless = way
                holds = self._way(statement, body) is None
            case ast.Assign(targets=[ast.Name(id=name)]):
                return self._of_name(statement, name, value, frame, of_number)
            case _:
                return None
        assert isinstance(top, ast.expr)
        return Condition(kind, holds is value, top, asked, holds, frame, endless)

    def _of_name(
        self, statement: ast.AST, name: str, value: bool, frame: FrameType, of_number: bool
    ) -> Condition | None:
        """What the next statement of the function that tests the variable does with it."""
        scope: ast.AST = statement
        while not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            scope = self._parents[scope]
        uses = sorted(_uses(scope, name), key=lambda node: (node.lineno, node.col_offset))
        line = getattr(statement, "lineno", 0)
        for node in sorted(uses, key=lambda node: node.lineno <= line):  # a loop comes back to them
            found = self.statement(node, value, of_number)
            if found is not None and isinstance(found[0], ast.Assert | ast.If | ast.While):
                return self.judge(*found, node, frame, of_number)
        return None

    def _way(self, statement: ast.If, body: list[ast.stmt]) -> tuple[Kind, bool] | None:
        """The kind of a branch that ends in a jump: a failure, the end of a loop, elsewhere."""
        last = body[-1] if body else None
        if isinstance(last, ast.Raise) or _exits(last):
            return "check", False
        if not isinstance(last, _JUMPS):
            return None
        loop: ast.AST | None = self._parents.get(statement)
        while loop is not None and not isinstance(
            loop, ast.For | ast.AsyncFor | ast.While | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            loop = self._parents.get(loop)
        in_loop = isinstance(loop, ast.For | ast.AsyncFor | ast.While)
        if not in_loop or isinstance(last, ast.Continue):
            return "guard", False
        return "stop", isinstance(loop, ast.While)


def _is_plain(node: ast.expr | None, frame: FrameType) -> bool:
    """Is it left out, or a number, ``None`` or ``...`` that is there without a look at the GPU?"""
    return node is None or isinstance(node, ast.Constant) or isinstance(_index(node, frame), int)


def _index(node: ast.expr, frame: FrameType) -> Any:
    """What is held by a part of an index, apart from its sign."""
    return _held(node.operand if isinstance(node, ast.UnaryOp) else node, frame)


def _size_at(
    owner: torch.Tensor, parts: list[ast.expr], place: int, frame: FrameType
) -> int | None:
    """The size of the dimension that a part of an index is of; every other one is plain."""
    held = [None if isinstance(part, ast.Slice) else _index(part, frame) for part in parts]
    if any(isinstance(each, bool) for each in held):
        return None
    takes = [isinstance(part, ast.Slice) or isinstance(each, int)
             for part, each in zip(parts, held, strict=True)]  # fmt: skip
    counts_back = Ellipsis in held[:place]
    dimension = owner.dim() - sum(takes[place:]) if counts_back else sum(takes[:place])
    return owner.shape[dimension] if 0 <= dimension < owner.dim() else None


def _constant(compared: ast.Compare, child: ast.AST) -> bool | None:
    """Is a comparison of ``child`` with True or False one that keeps its truth?"""
    match compared:
        case ast.Compare(left=left, ops=[relation], comparators=[ast.Constant(value=bool(other))]):
            if left is child and isinstance(relation, ast.Eq | ast.Is):
                return other
            if left is child and isinstance(relation, ast.NotEq | ast.IsNot):
                return not other
    return None


def _name_of(call: ast.Call) -> str:
    name: str = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return name


def _exits(statement: ast.stmt | None) -> bool:
    match statement:
        case ast.Expr(value=ast.Call() as call):
            return _name_of(call) in _ENDS
    return False


def _uses(scope: ast.AST, name: str) -> Iterator[ast.Name]:
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            yield node


@functools.lru_cache(maxsize=64)
def _source(filename: str) -> _Source | None:
    tree = file_syntax(filename)
    return None if tree is None else _Source(tree)


@functools.lru_cache(maxsize=256)
def _positions(code: CodeType) -> list[tuple[Any, ...]]:
    return list(code.co_positions())


# ---
# Numbers.


_FUNCTIONS = {"abs": abs, "float": float, "int": int, "max": max, "min": min, "round": round}
_ASKED = "_trainfit_asked"
#: A number of no special token that is known of: those are the first ones (0 to 3), BERT's (100 to
#: 103), or the last ones of a vocabulary.
_NO_SPECIAL = 7
#: Numbers in a list (of tokens that end a text) that are tried.
_MOST_OF_A_LIST = 64


class _NotPlainError(Exception):
    """An expression that may be more than numbers, or that may do something."""


def number(condition: Condition, usual: float, wanted: bool) -> float:
    """A number for what is asked for with which the test is ``wanted``: the ``usual`` one if that
    will do, or if the rest of the test is more than numbers and variables that hold some.

    Where it is to differ from what is not known (``token != tokenizer.end()``), it is one that no
    special token has."""
    points: list[float] = []
    try:
        body = _plain(condition.test, condition.asked, condition.frame, points)
        test = compile(ast.fix_missing_locations(ast.Expression(body)), "<test>", "eval")
        for tried in _candidates(usual, points):
            if bool(eval(test, {"__builtins__": {}, **_FUNCTIONS, _ASKED: tried})) is wanted:
                return tried
    except (_NotPlainError, ArithmeticError, TypeError, ValueError):
        if isinstance(usual, int) and _is_to_differ(condition.test, condition.asked, wanted):
            return _NO_SPECIAL
    return usual


def _is_to_differ(test: ast.AST, asked: ast.expr, wanted: bool) -> bool:
    """Is the part that is asked for compared with another that it is not to be equal to?"""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _is_to_differ(operand, asked, not wanted)
        case ast.BoolOp(values=values):
            return any(_is_to_differ(value, asked, wanted) for value in values)
        case ast.Compare(ops=[ast.Eq() | ast.In()]):
            return not wanted and any(each is asked for each in ast.walk(test))
        case ast.Compare(ops=[ast.NotEq() | ast.NotIn()]):
            return wanted and any(each is asked for each in ast.walk(test))
    return False


def _candidates(usual: float, points: list[float]) -> Iterator[float]:
    yield usual
    if isinstance(usual, int):
        yield from (0, *(int(point) + more for point in points for more in (0, 1, -1)))
        return
    yield 0.0
    for point in map(float, points):
        yield from (point, math.nextafter(point, math.inf), math.nextafter(point, -math.inf))
        yield from (point / 2, point * 2, point - 1, point + 1)


def _plain(node: ast.AST, asked: ast.expr, frame: FrameType, points: list[float]) -> Any:
    """A copy of an expression of numbers, with a name for the part that is asked for."""
    if node is asked or (
        isinstance(node, ast.Name) and isinstance(asked, ast.Name) and node.id == asked.id
    ):
        return ast.Name(_ASKED, ast.Load())
    match node:
        case ast.Name() | ast.Attribute() | ast.Constant():
            held = _held(node, frame, computed=True)
            is_list = isinstance(held, list | tuple | set | frozenset)
            several = tuple(held) if is_list and len(held) <= _MOST_OF_A_LIST else (held,)
            if not all(isinstance(each, int | float) for each in several):
                raise _NotPlainError
            points += several
            constants: list[ast.expr] = [ast.Constant(each) for each in several]
            return ast.Tuple(constants, ast.Load()) if is_list else constants[0]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            plain = [_plain(argument, asked, frame, points) for argument in args]
            return ast.Call(ast.Name(name, ast.Load()), plain, [])
        case (
            ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.Compare() | ast.Tuple() | ast.List()
            | ast.Set()
        ):  # fmt: skip
            fields: dict[str, Any] = {
                name: [_plain(each, asked, frame, points) for each in value]
                if isinstance(value, list)
                else _plain(value, asked, frame, points)
                for name, value in ast.iter_fields(node)
            }
            kind: Any = type(node)
            return kind(**fields)
        case ast.expr_context() | ast.operator() | ast.unaryop() | ast.boolop() | ast.cmpop():
            return node
    raise _NotPlainError


def _held(node: ast.AST, frame: FrameType, *, computed: bool = False) -> Any:
    """What a variable or an attribute of one holds, where reading it does nothing else; with
    ``computed`` also what an object gives out as one, which the script is about to read
    (``tokenizer.eos_token_id``)."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return locals_of(frame).get(name, frame.f_globals.get(name))
        case ast.Attribute(value=owner, attr=name):
            holder = _held(owner, frame, computed=computed)
            stored = getattr(holder, "__dict__", {})
            if name in stored or not computed or isinstance(holder, torch.Tensor):
                return stored.get(name)
            with contextlib.suppress(Exception):  # of the script's own: it meets it right after
                return getattr(holder, name)
    return None
