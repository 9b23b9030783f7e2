"""The function that a frame is calling, for calls into C, which have no frame of their own.

A frame's current instruction has a place in the source (PEP 657); the expression there names
what is called, and the frame's variables say what that is. Attributes are looked up without
running anyone's code: no property and no ``__getattr__`` is called.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import functools
import gc
import inspect
import itertools
import linecache
import operator
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from trainfit.results.runs.trace import CallSite
from trainfit.simgpu.device.user_location import calls_of_user, locals_of

_MISSING: Final = object()
#: Of a statement this long nothing is parsed: looking must stay cheap.
_LONGEST_LINES: Final = 60

#: While one of these is the current instruction, the interpreter runs nothing but Python.
_PYTHON: Final = ("RESUME", "JUMP", "POP_JUMP", "LOAD_FAST", "STORE_FAST", "LOAD_CONST", "NOP")

#: Callables whose work is what their first argument does: they only drive an iterator.
_DRIVERS: Final[tuple[Any, ...]] = (
    *(next, iter, list, tuple, set, frozenset, dict, sum, min, max, sorted, any, all, map, filter),
    *(zip, enumerate, reversed, itertools.islice, itertools.chain),
)


@dataclass(frozen=True)
class Callee:
    """What is called: the module that it is from, and its name there ("VideoFrame.to_ndarray").

    ``text`` is how the source writes it ("self.transform"); ``mapped`` whether the call copies
    from a file that is mapped into memory. ``module`` is empty where only the text is known.
    """

    module: str = ""
    name: str = ""
    text: str = ""
    mapped: bool = False


NOTHING: Final = Callee()


def callee(frame: types.FrameType, lasti: int | None = None) -> Callee:
    """What ``frame`` calls now; ``NOTHING`` where it runs Python or that is unknown.

    With ``lasti`` what it called at that instruction: a frame that runs may have gone on.
    """
    try:
        node = node_at(frame.f_code, frame.f_lasti if lasti is None else lasti)
        found = _Names(frame.f_locals, frame.f_globals).called(node) if node else NOTHING
    except Exception:  # an object that does not even bear to be looked at
        return NOTHING
    # Classes may say anything of themselves.
    told = isinstance(found.module, str) and isinstance(found.name, str)
    return found if told else NOTHING


def written_at(code: types.CodeType, lasti: int) -> str:
    """How the source writes what is called there: "self.transform"; empty if nothing is."""
    node = node_at(code, lasti)
    return _text(node) if isinstance(node, ast.Call) else ""


def node_at(code: types.CodeType, lasti: int) -> ast.AST | None:
    """The expression that the instruction at ``lasti`` evaluates; ``None`` for plain Python."""
    if lasti < 0 or dis.opname[code.co_code[lasti]].startswith(_PYTHON):
        return None
    place = next(itertools.islice(code.co_positions(), lasti // 2, None), None)
    if place is None or None in place:
        return None
    first, last, begin, end = place
    assert first is not None and last is not None and begin is not None and end is not None
    if last - first > _LONGEST_LINES:
        # A long loop or "with": its head is enough.
        last, end = first, 1 << 20
    lines = [line.encode() for line in linecache.getlines(code.co_filename)[first - 1 : last]]
    if not lines:
        return None
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return _parsed(b"".join(lines).decode(errors="replace"))


def _parsed(text: str) -> ast.AST | None:
    # In parentheses an expression may go over several lines; a loop's head has no body yet.
    for attempt, mode in (
        (f"({text})", "eval"),
        (text, "exec"),
        (f"{text.rstrip()}\n pass", "exec"),
    ):
        try:
            tree = ast.parse(attempt, mode=mode)
        except (SyntaxError, ValueError):
            continue
        if isinstance(tree, ast.Expression):
            return _worked_on(tree.body)
        if isinstance(tree, ast.Module) and tree.body:
            return _worked_on(tree.body[0])
    return None


def _worked_on(node: ast.AST) -> ast.AST:
    """The expression that a loop or "with" asks, or the value of a statement; anything else is
    itself."""
    if isinstance(node, ast.For | ast.AsyncFor):
        return node.iter
    if isinstance(node, ast.With | ast.AsyncWith):
        return node.items[0].context_expr
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return node.generators[0].iter
    if isinstance(node, ast.Return | ast.Expr | ast.Assign | ast.AugAssign) and node.value:
        return node.value
    return node


def _text(node: ast.AST) -> str:
    """Names and dots of what is called: "self.transform", "open().read"."""
    if isinstance(node, ast.Call):
        return _text(node.func)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        above = _text(node.value) + ("()" if isinstance(node.value, ast.Call) else "")
        return f"{above}.{node.attr}" if above else node.attr
    if isinstance(node, ast.Subscript):
        return _text(node.value) + "[]"
    return ""


class _Names:
    """What the names of a frame stand for."""

    def __init__(self, local: Mapping[str, Any], outer: Mapping[str, Any]) -> None:
        self._local, self._outer = local, outer

    def called(self, node: ast.AST) -> Callee:
        text = _text(node)
        if isinstance(node, ast.Call):
            function = self.value(node.func)
            if any(function is driver for driver in _DRIVERS) and node.args:
                driven = self.called(node.args[-1 if function in (map, filter) else 0])
                return driven if driven.module else Callee("builtins", text, text)
            module, name = self._function(node.func, function)
            mapped = any(self._is_mapped(argument) for argument in (_base(node.func), *node.args))
            return Callee(module, name, text, mapped)
        if isinstance(node, ast.Subscript):
            owner = self.value(node.value)
            # Taking a part of a mapped array is a view: the copy comes later.
            return self._of_object(owner, "__getitem__", text)
        if isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare):
            return self._operation(node)
        if isinstance(node, ast.Name | ast.Attribute):
            return self._of_object(self.value(node), "", text)
        return Callee(text=text)

    def _of_object(self, value: Any, method: str, text: str) -> Callee:
        if value is _MISSING:
            return Callee(text=text)
        kind = type(value)
        # Generators, Cython's too, are named after the function that made them.
        if kind.__name__ == "generator" and (made := _plain_text(value, "__qualname__")):
            return Callee(kind.__module__, made, text)
        return Callee(kind.__module__, f"{kind.__qualname__}.{method}".rstrip("."), text)

    def _operation(self, node: ast.BinOp | ast.UnaryOp | ast.Compare) -> Callee:
        operands = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
        for operand in operands:
            value = self.value(operand)
            if isinstance(value, np.ndarray | np.generic | torch.Tensor):
                kind = type(value)
                return Callee(
                    kind.__module__, f"{kind.__name__} arithmetic", "", self._is_mapped(operand)
                )
        for operand in operands:
            found = self.called(operand) if isinstance(operand, ast.Call | ast.BinOp) else NOTHING
            if found.module:
                return Callee(found.module, "arithmetic")
        return NOTHING

    def _function(self, node: ast.expr, function: Any) -> tuple[str, str]:
        if function is not _MISSING:
            return named(function)
        if not isinstance(node, ast.Attribute):
            return "", ""
        base = self.value(node.value)
        if base is not _MISSING:
            kind = type(base)
            return kind.__module__, f"{kind.__qualname__}.{node.attr}"
        inner = self.called(node.value)
        return inner.module, node.attr if inner.module else ""

    def _is_mapped(self, node: ast.AST | None) -> bool:
        if isinstance(node, ast.Subscript):
            return self._is_mapped(node.value)
        if not isinstance(node, ast.Name | ast.Attribute):
            return False
        return is_mapped(self.value(node))

    def value(self, node: ast.AST) -> Any:
        """What a name or attribute stands for, or ``_MISSING``."""
        if isinstance(node, ast.Name):
            for space in (self._local, self._outer, vars(builtins)):
                if node.id in space:
                    return space[node.id]
            return _MISSING
        if isinstance(node, ast.Subscript):
            # A part of an array is an array; of anything else it is unknown.
            value = self.value(node.value)
            return value if isinstance(value, np.ndarray | torch.Tensor) else _MISSING
        if isinstance(node, ast.Attribute):
            return attribute(self.value(node.value), node.attr)
        return _MISSING


def attribute(value: Any, name: str) -> Any:
    """An attribute as it is stored; ``_MISSING`` where it takes a call to know it."""
    if value is _MISSING:
        return _MISSING
    if isinstance(value, types.ModuleType):
        return vars(value).get(name, _MISSING)
    found = inspect.getattr_static(value, name, _MISSING)
    if isinstance(found, types.MemberDescriptorType):  # of __slots__
        try:
            return found.__get__(value)
        except AttributeError:
            return _MISSING
    if isinstance(found, staticmethod | classmethod):
        return found.__func__
    asked = isinstance(found, property | functools.cached_property | types.GetSetDescriptorType)
    return _MISSING if asked else found


def named(function: Any) -> tuple[str, str]:
    """Module and name of a callable: ("_io", "BufferedReader.read")."""
    if isinstance(function, functools.partial):
        return named(function.func)
    if isinstance(function, types.MethodType):
        function = function.__func__
    if isinstance(function, types.BuiltinMethodType):
        owner = function.__self__
        if owner is not None and not isinstance(owner, types.ModuleType):
            kind = owner if isinstance(owner, type) else type(owner)
            return kind.__module__, f"{kind.__qualname__}.{function.__name__}"
        module = function.__module__ or getattr(owner, "__name__", "")
        return str(module), function.__name__
    if isinstance(function, types.MethodDescriptorType | types.WrapperDescriptorType):
        owner = function.__objclass__
        return owner.__module__, f"{owner.__qualname__}.{function.__name__}"
    if isinstance(function, type | types.FunctionType):
        return function.__module__ or "", function.__qualname__
    name = _plain_text(function, "__name__") or type(function).__qualname__
    module = type(function).__module__
    if module.startswith("_cython"):  # the type is Cython's, the function of the module it is in
        name = _plain_text(function, "__qualname__") or name
        module = _plain_text(function, "__module__") or module
    return module, name


def _plain_text(value: Any, name: str) -> str:
    """An attribute of a type that is not written in Python, if it is a text."""
    found = inspect.getattr_static(type(value), name, None)
    if isinstance(found, types.GetSetDescriptorType | types.MemberDescriptorType):
        found = found.__get__(value)
    return found if isinstance(found, str) else ""


def is_mapped(value: Any) -> bool:
    """Is this an array that lies in a file that is mapped into memory?"""
    while isinstance(value, np.ndarray):
        if isinstance(value, np.memmap):
            return value._mmap is not None  # type: ignore[attr-defined]
        value = value.base
    return type(value).__name__ == "mmap"


def _base(node: ast.expr) -> ast.AST | None:
    """The object whose method is called."""
    return node.value if isinstance(node, ast.Attribute) else None


# ---
# The stack of a thread that makes samples, looked at from another thread.


#: A call: its code, the instruction, and the variables of its module.
Call = tuple[types.CodeType, int, Mapping[str, Any]]
#: A call that a thread is in, by its frame, and the instruction.
_Seen = tuple[types.FrameType, int]
_CALL: Final = operator.attrgetter("f_code", "f_lasti", "f_globals")
_PLACE: Final = operator.attrgetter("f_lasti")


def calls_of(thread: int) -> list[Call]:
    """Each call that a thread is in, the innermost first.

    All are of one moment: everything here happens in one call of ``list.extend``, inside of
    which nothing runs Python code and so nobody can take the interpreter's lock from us. With
    a loop in Python the thread goes on while its frames are read. (Somebody's callback of the
    garbage collector would run, so there is no collection meanwhile.)

    No frame is kept. A frame that somebody holds while its function returns keeps what its
    variables held, and who lets go of it last frees that: tensors that another thread frees while
    the training is in an operator make PyTorch 2.13 fail ("Attempted to make a tensor into a
    differentiable view, but …").
    """
    calls: list[Call] = []
    _extend(calls, map(_CALL, _frames_of(thread)))
    return calls


def called_now(thread: int, code: types.CodeType, lasti: int) -> Callee | None:
    """What a thread's innermost call calls; ``None``: it is not at that place any more."""
    with undisturbed():
        frame, at = next(iter(_stack_of(thread)), (None, -1))
        if frame is None or frame.f_code is not code or at != lasti:
            return None
        return callee(frame, lasti)


def locals_in(thread: int, code: types.CodeType) -> dict[str, Any]:
    """The variables of the innermost call of a function that a thread is in; none: it is in no such
    call any more. To be asked and let go of within :func:`undisturbed`."""
    frames = (frame for frame, _ in _stack_of(thread) if frame.f_code is code)
    frame = next(frames, None)
    return {} if frame is None else locals_of(frame)


#: Seconds for which nobody asks for the interpreter's lock: longer than any look.
STILL_S: Final = 1.0


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Nobody takes the interpreter's lock from this thread, unless it reads a file: frames and
    variables of another thread may be held meanwhile."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(STILL_S)
    ours = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == ours:
            sys.setswitchinterval(usual)


def _stack_of(thread: int) -> list[_Seen]:
    """Frames and their places."""
    frames, again = itertools.tee(_frames_of(thread))
    stack: list[_Seen] = []
    _extend(stack, zip(frames, map(_PLACE, again), strict=False))
    return stack


def _frames_of(thread: int) -> Iterator[types.FrameType]:
    leaf = map(operator.itemgetter(thread), itertools.starmap(sys._current_frames, ((),)))
    return itertools.accumulate(itertools.chain(leaf, itertools.repeat("f_back")), getattr)


def _extend(found: list[Any], each: Iterator[Any]) -> None:
    collects = bool(gc.callbacks) and gc.isenabled()
    if collects:
        gc.disable()
    with contextlib.suppress(AttributeError, KeyError):  # beyond the outermost; no such thread
        found.extend(each)
    if collects:
        gc.enable()


@functools.lru_cache(1 << 14)
def called_in(code: types.CodeType, lasti: int) -> str:
    """How the source writes what a frame calls."""
    return written_at(code, lasti)


def fetchers() -> frozenset[int]:
    """The identities of the fetchers' code objects."""
    from trainfit.torch_private.data_loading import FETCHERS

    return frozenset(id(kind.__dict__["fetch"].__code__) for kind in FETCHERS)


# ---
# The user's calls around a frame.


def users_calls(frame: types.FrameType) -> tuple[CallSite, ...]:
    """The user's calls from ``frame`` outwards, the innermost first."""
    sites, makers = [], []
    for caller, called in calls_of_user(frame):
        code = called.f_code
        name, names = code.co_name, _parameters(code)
        if names[:1] == ("self",):
            kind, names = type(locals_of(called).get("self")), names[1:]
            if name == "__init__":
                name = kind.__name__
            elif isinstance(made := inspect.getattr_static(kind, "__init__"), types.FunctionType):
                makers.append(CallSite("", kind.__name__, _parameters(made.__code__)[1:]))
        sites.append(CallSite(f"{caller.f_code.co_filename}:{caller.f_lineno}", name, names))
    return (*sites, *makers)


def _parameters(code: types.CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
