"""Containers that keep tensors up to a number of them, as a replay buffer does: a deque, or a list
whose code has ``if len(memory) > 1000: memory.pop(0)``, or ``if len(self.memory) < self.capacity:
self.memory.append(…)``; and how many more elements they have room for.

The code is read, none of it runs: a limit is a number, a variable, or an attribute of what holds
the list.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
import itertools
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final, NamedTuple

import torch

from trainfit.findings.source_code import file_syntax
from trainfit.hooks.held_objects import tensors_in
from trainfit.simgpu.allocator.settings import MIN_BLOCK
from trainfit.simgpu.device.user_location import locals_of

#: Elements that are looked at, how deep, and attributes of one object.
_ELEMENTS: Final = 4096
_DEEPEST: Final = 3
_ATTRIBUTES: Final = 32
#: Lists without a bound of their own whose code is read.
_LISTS: Final = 8
#: Calls that make a list longer by one, by more, and shorter.
_ONE_MORE: Final = ("append", "insert", "appendleft")
_MORE: Final = (*_ONE_MORE, "extend", "extendleft")
_LESS: Final = ("pop", "popleft", "clear")
_AT_MOST: Final = (ast.Lt, ast.LtE)
_AT_LEAST: Final = (ast.Gt, ast.GtE, ast.Eq)
_ARITHMETIC: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_OWN: Final = __name__.partition(".")[0] + "."
_LOOPS: Final = (ast.For, ast.While, ast.AsyncFor)
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)


class _Holder(NamedTuple):
    """What has a list: its name there, the file of the code, the variables that this code sees,
    and the object whose attribute it is."""

    name: str
    file: str
    variables: Mapping[str, Any]
    owner: Any = None


def room_left(elements: Any) -> int | None:
    """How many more elements it can have; ``None``: no limit is known."""
    for holder in _holders(elements):
        code = _Code.of(holder)
        if code is None:
            continue
        if code.is_preallocated:
            return sum(each is None for each in elements) or None
        for limit in code.limits():
            value = _value(limit, holder)
            if value is not None and value >= len(elements):
                return value - len(elements)
    return None


def _holders(elements: Any) -> Iterator[_Holder]:
    """Variables of this thread's functions that are running, attributes of objects."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        held = locals_of(frame)
        names = [name for name, each in held.items() if each is elements]
        is_own = frame.f_globals.get("__name__", "").startswith(_OWN)
        for name in () if is_own else names:
            seen = {**frame.f_globals, **held}
            yield _Holder(name, frame.f_code.co_filename, seen)
        frame = frame.f_back
    for referrer in gc.get_referrers(elements):
        for owner in gc.get_referrers(referrer) if type(referrer) is dict else [referrer]:
            attributes = getattr(owner, "__dict__", None)
            if not isinstance(attributes, dict) or isinstance(owner, type):
                continue
            module = owner if isinstance(owner, ModuleType) else _module_of(owner)
            file = getattr(module, "__file__", None)
            for name, value in list(attributes.items()) if file else ():
                if value is elements:
                    held_by = None if owner is module else owner
                    yield _Holder(name, str(file), vars(module), held_by)


def _module_of(owner: Any) -> ModuleType | None:
    return sys.modules.get(type(owner).__module__)


def _value(limit: ast.expr, holder: _Holder) -> int | None:
    """The number that an expression stands for now."""
    try:
        found = _evaluated(limit, holder)
    except (LookupError, AttributeError, TypeError, ValueError, ArithmeticError):
        return None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _evaluated(node: ast.expr, holder: _Holder) -> Any:
    """Raises for what is neither a number, a variable, an attribute nor made of these."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return holder.variables[node.id]
        case ast.Attribute(value=ast.Name()) if holder.owner is not None:
            return inspect.getattr_static(holder.owner, node.attr)
        case ast.Attribute():
            return inspect.getattr_static(_evaluated(node.value, holder), node.attr)
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            left, right = _evaluated(node.left, holder), _evaluated(node.right, holder)
            if all(isinstance(each, int | float) for each in (left, right)):
                return _ARITHMETIC[type(node.op)](left, right)
        case ast.Call(func=ast.Name(id="int"), args=[number]):
            found = _evaluated(number, holder)
            return int(found) if isinstance(found, int | float) else None
        case ast.UnaryOp(op=ast.USub()):
            return -_evaluated(node.operand, holder)
    raise ValueError(ast.dump(node))


class _Code:
    """What a file does with a list of one name."""

    def __init__(self, tree: ast.Module, name: str) -> None:
        self._name = name
        self._around: dict[ast.AST, ast.AST] = {
            child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)
        }
        nodes = list(ast.walk(tree))
        self._adds = [node for node in nodes if self._calls(node, _MORE) or self._is_added_to(node)]
        self._tests = [node for node in nodes if isinstance(node, ast.If | ast.While)]
        self._cuts = [cut for node in nodes if (cut := self._cut(node)) is not None]
        self.is_preallocated = not self._adds and any(
            isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
            and self._is(node.value) for node in nodes
        )  # fmt: skip
        """Is nothing added to it, and elements put in its places?"""

    @classmethod
    def of(cls, holder: _Holder) -> _Code | None:
        tree = file_syntax(holder.file) if Path(holder.file).is_file() else None
        return None if tree is None else cls(tree, holder.name)

    def limits(self) -> Iterator[ast.expr]:
        """What its length is held at."""
        for test in self._tests:
            for compared in _conditions(test.test):
                if (found := self._length(compared)) is None:
                    continue
                is_least, limit = found
                adding, other = (test.orelse, test.body) if is_least else (test.body, test.orelse)
                if (self._adds and all(self._within(add, adding) for add in self._adds)) or (
                    is_least and self._shrinks(other) and self._follows(test)
                ):
                    yield limit
        for statement, limit in self._cuts:
            if self._follows(statement):
                yield limit

    def _is(self, node: ast.AST) -> bool:
        return getattr(node, "attr", None) == self._name or getattr(node, "id", "") == self._name

    def _calls(self, node: ast.AST, methods: Sequence[str]) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr=method)):
                return method in methods and self._is(value)
        return False

    def _is_added_to(self, node: ast.AST) -> bool:
        return isinstance(node, ast.AugAssign) and self._is(node.target)

    def _length(self, node: ast.expr) -> tuple[bool, ast.expr] | None:
        """What ``len(list) > limit`` says: is it so from a length on, and the limit."""
        if not isinstance(node, ast.Compare) or len(node.ops) != 1:
            return None
        left, right, op = node.left, node.comparators[0], type(node.ops[0])
        for one, other, is_left in ((left, right, True), (right, left, False)):
            match one:
                case ast.Call(func=ast.Name(id="len"), args=[listed]) if self._is(listed):
                    if issubclass(op, _AT_LEAST if is_left else (*_AT_MOST, ast.Eq)):
                        return True, other
                    if issubclass(op, _AT_MOST if is_left else (ast.Gt, ast.GtE)):
                        return False, other
        return None

    def _within(self, node: ast.AST, statements: Sequence[ast.stmt]) -> bool:
        return any(node in ast.walk(statement) for statement in statements)

    def _shrinks(self, statements: Sequence[ast.stmt]) -> bool:
        for node in (each for statement in statements for each in ast.walk(statement)):
            if self._calls(node, _LESS):
                return True
            match node:
                case ast.Delete(targets=[ast.Subscript(value=value)]) if self._is(value):
                    return True
                case ast.Assign(targets=[target]) if self._is(target):
                    return True
        return False

    def _cut(self, node: ast.AST) -> tuple[ast.AST, ast.expr] | None:
        """``memory = memory[-1000:]``, outside of a condition."""
        match node:
            case ast.Assign(
                targets=[target],
                value=ast.Subscript(
                    value=value, slice=ast.Slice(lower=ast.UnaryOp(op=ast.USub(), operand=limit))
                ),
            ) if self._is(target) and self._is(value):
                return node, limit
        return None

    def _follows(self, statement: ast.AST) -> bool:
        """Is it met as often as elements are added, one at a time?"""
        function, loops = self._surroundings(statement)
        is_whole = isinstance(statement, ast.While | ast.Assign)
        return bool(self._adds) and all(
            (is_whole or self._calls(add, _ONE_MORE))
            and self._surroundings(add) == (function, loops)
            for add in self._adds
        )

    def _surroundings(self, node: ast.AST) -> tuple[ast.AST | None, list[ast.AST]]:
        """The function that a node is in, and the loops there."""
        loops: list[ast.AST] = []
        around = self._around.get(node)
        while around is not None and not isinstance(around, _FUNCTIONS):
            if isinstance(around, _LOOPS):
                loops.append(around)
            around = self._around.get(around)
        return around, loops


def _conditions(test: ast.expr) -> list[ast.expr]:
    """The conditions that hold together."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return test.values
    return [test]


# ---
# The containers.


class Buffer(NamedTuple):
    """A container on the GPU: its bytes, its elements, and how many it has room for yet."""

    nbytes: int
    elements: int
    left: int


def bounded_buffers() -> tuple[Buffer, ...]:
    """The containers with a bound that hold memory of the GPU and are not full, the largest first:
    deques with a ``maxlen``, and lists that the script's code keeps short. A tensor counts to the
    first that has it."""
    bounded: list[tuple[dict[int, int], Any, int]] = []
    others: list[tuple[dict[int, int], Any]] = []
    for each in gc.get_objects():
        if type(each) is deque and each.maxlen:
            if 0 < len(each) < each.maxlen and (held := _device_bytes(each)):
                bounded.append((held, each, each.maxlen - len(each)))
        elif type(each) in (list, deque) and len(each) > 1 and _holds_tensors(each):
            others.append((_device_bytes(each), each))
    others.sort(key=lambda pair: -sum(pair[0].values()))
    for held, each in others[:_LISTS]:
        if held and (room := room_left(each)):
            bounded.append((held, each, room))
    bounded.sort(key=lambda found: -sum(found[0].values()))
    counted: set[int] = set()
    buffers = []
    for held, each, left in bounded:
        if counted.isdisjoint(held):
            counted.update(held)
            elements = sum(one is not None for one in itertools.islice(each, _ELEMENTS))
            buffers.append(Buffer(sum(held.values()), elements, left))
    return tuple(buffers)


def _holds_tensors(elements: list[Any] | deque[Any]) -> bool:
    """Is the first or the last element on the GPU, as far as a quick look goes? Lists of parameters
    are an optimizer's, and large ones would leave no room for others among the few that are
    read."""
    with contextlib.suppress(Exception):  # elements of the script may be of any kind
        ends = (elements[0], elements[-1])
        return any(
            one.is_cuda and not isinstance(one, torch.nn.Parameter)
            for end in ends
            for one in tensors_in(end, depth=_DEEPEST - 1, attributes=_ATTRIBUTES)
        )
    return False


def _device_bytes(elements: Iterable[Any]) -> dict[int, int]:
    """The bytes of each tensor on the GPU, by its identity."""
    tensors: dict[int, torch.Tensor] = {}
    with contextlib.suppress(Exception):
        tensors = {
            id(tensor): tensor
            for element in itertools.islice(elements, _ELEMENTS)
            for tensor in tensors_in(element, depth=_DEEPEST, attributes=_ATTRIBUTES)
            if tensor.is_cuda
        }
    return {key: -(-tensor.nbytes // MIN_BLOCK) * MIN_BLOCK for key, tensor in tensors.items()}
