"""The line that made a NaN or an infinity: of the training loop's variables, the first that is not
finite and was made of what is.

It is looked for once, at the first loss that is not finite, on the CPU alone: the variables of the
script's functions that are called then still hold what that was computed of.

Lines of what a loss is computed by that are not defined everywhere: a logarithm, a square root,
a division by a sum, a mask of -inf. Where weights are not finite any more, what broke them is not
seen, and the source alone tells where it may have been.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

import numpy as np
import torch

from trainfit.findings.source_code import function_syntax, names_in, relative_place
from trainfit.results.runs.learning import Misuse
from trainfit.simgpu.device.user_location import is_library, locals_of
from trainfit.torch_private.operators import no_dispatch

#: Functions that a logarithm's border is the same for, and those of a square root's.
_LOGARITHMS: Final = ("log", "log2", "log10", "rsqrt", "logit")
_BORDERS: Final = ("sqrt", "acos", "asin", "atanh")
#: Sums that may be 0, in a divisor.
_SUMS: Final = ("sum", "norm", "std", "var", "max", "min", "count_nonzero")
#: Modules whose functions those are.
_OF_MODULES: Final = ("torch", "F", "functional", "np", "numpy")
_MASKS: Final = ("masked_fill", "masked_fill_", "where")
#: What keeps a number from the border; and masks that leave each row something.
_KEPT: Final = re.compile(r"clamp|clip|eps|1e-|softplus|exp\(|nan_to_num|maximum|max\(.*,|where\(")
_CAUSAL: Final = re.compile(r"triu|tril|causal|subsequent|eye\(|diag", re.IGNORECASE)
_INFINITY: Final = re.compile(
    r"-\s*(?:float\(.inf.\)|torch\.inf|math\.inf|np\.inf)|float\(.-inf.\)"
)
#: Functions that are looked at, of which modules, and lines that are told.
_MOST: Final = 40
_MODULES: Final = 200
_TOLD: Final = 2


def risky(frames: Sequence[FrameType]) -> Misuse | None:
    """The kind of the risk, the source and the place of a risky line or two in the script's
    functions that compute a loss, the innermost first, and in what they call; ``None``: there is
    none, or there are more."""
    with contextlib.suppress(Exception):  # sources and objects may be of any kind
        own = {frame.f_code: (frame.f_lineno, frame.f_globals) for frame in frames}
        values = [
            each
            for frame in frames
            for each in (*locals_of(frame).values(), *frame.f_globals.values())
        ]
        return _only(_with_called(own | _forwards(values)))
    return None


def risky_in(called: Iterable[Any]) -> Misuse | None:
    """The same as :func:`risky`, of modules and functions of the script that one line calls."""
    with contextlib.suppress(Exception):
        values = list(called)
        own = {e.__code__: (0, e.__globals__) for e in values if isinstance(e, FunctionType)}
        return _only(_with_called(own | _forwards(values)))
    return None


#: Functions with the line that runs (0: any may), and what their names stand for.
_Codes = dict[CodeType, tuple[int, dict[str, Any]]]


def _only(codes: _Codes) -> Misuse | None:
    found: dict[str, tuple[str, str]] = {}
    own = [(code, at) for code, (at, _) in codes.items() if not is_library(code.co_filename)]
    for code, line in own[:_MOST]:
        tree = function_syntax(code)
        for node in () if tree is None else _parts(tree, line):
            for at, kind in _risks(node):
                source = linecache.getline(code.co_filename, at).strip()
                found.setdefault(relative_place(f"{code.co_filename}:{at}"), (kind, source))
    if not 0 < len(found) <= _TOLD:
        return None
    place, (kind, source) = next(iter(found.items()))
    return Misuse("may_be_made", (kind, source, *list(found)[1:]), place)


def _forwards(values: Iterable[Any]) -> _Codes:
    """The forward passes of modules."""
    forwards: _Codes = {}
    for model in [value for value in values if isinstance(value, torch.nn.Module)]:
        for part, _ in zip(model.modules(), range(_MODULES), strict=False):
            forward = getattr(type(part), "forward", None)
            if isinstance(forward, FunctionType):
                forwards[forward.__code__] = 0, forward.__globals__
    return forwards


def _with_called(codes: _Codes) -> _Codes:
    """The codes, and the functions that these call by name."""
    called: _Codes = {}
    for code, (_, space) in codes.items():
        for name in code.co_names:
            value = space.get(name)
            if isinstance(value, FunctionType):
                called[value.__code__] = 0, value.__globals__
    return {**codes, **{code: each for code, each in called.items() if code not in codes}}


def _parts(tree: ast.AST, line: int) -> Iterable[ast.AST]:
    """All of a function; of one that runs, what the names on its line are computed by."""
    if not line:
        return [tree]
    made = [
        (name, node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.lineno <= line
        for name in names_in(node, ast.Store)
    ]
    at_line = [e for e in ast.walk(tree) if isinstance(e, ast.stmt) and e.lineno <= line]
    last = max((each.lineno for each in at_line), default=0)
    # Several statements may stand on it: opt.zero_grad(); loss.backward(); opt.step()
    needed = {name for e in at_line if e.lineno == last for name in names_in(e, ast.Load)}
    parts: dict[ast.AST, None] = {}
    while more := [(n, each) for n, each in made if n in needed and each not in parts]:
        for _, each in more:
            parts[each] = None
            needed.update(names_in(each, ast.Load))
    return parts


def _risks(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines of a part of the source, and what is at its border there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            text = ast.unparse(node.right)
            sums = {_called(call) for call in ast.walk(node.right) if isinstance(call, ast.Call)}
            if (
                sums & set(_SUMS)
                and not _KEPT.search(text)
                and not isinstance(node.right, ast.BinOp)
            ):
                yield node.lineno, "division"
        elif isinstance(node, ast.Call):
            name, text = _called(node), ast.unparse(node)
            if name in (*_LOGARITHMS, *_BORDERS) and not _KEPT.search(text):
                yield node.lineno, "logarithm" if name in _LOGARITHMS else "root"
            is_mask = name in _MASKS and _INFINITY.search(text) is not None
            if is_mask and not _CAUSAL.search(text):
                yield node.lineno, "mask"


def _called(node: ast.Call) -> str:
    """The own name of a function of tensors: of a module (``torch.log(x)``), or a method."""
    if not isinstance(node.func, ast.Attribute):
        return ""
    of, name = node.func.value, node.func.attr
    if isinstance(of, ast.Name) and of.id in _OF_MODULES:
        return name
    # ``self.log(…)`` and ``logger.log(…)`` are others; Python's ``math`` raises by itself.
    is_plain = name in (*_LOGARITHMS, *_BORDERS)
    return "" if is_plain and (node.args or node.keywords) else name


#: Functions of the script that are looked at, from the one that computes the loss outwards.
_FRAMES: Final = 4
#: Names, entries of a batch, and numbers in all that are looked at: some 10 ms, twice in a run.
_MOST_NAMES: Final = 300
_ENTRIES: Final = 64
_MOST_NUMBERS: Final = 1 << 24
#: Methods that hand on the numbers that they are given.
_SAME: Final = frozenset(
    (
        *("to", "cuda", "cpu", "float", "double", "half", "bfloat16", "type", "detach", "clone"),
        *("contiguous", "view", "reshape", "flatten", "squeeze", "unsqueeze", "permute"),
        *("transpose", "items", "values", "requires_grad_"),
    )
)


#: Weights are not finite: the update before made them so.
_BROKEN: Final = Misuse("weights_not_finite")


class Origins:
    """The origins of numbers that are not finite. Masks of -inf and missing labels are so in steps
    whose loss is finite, too: they are looked at once in such a step."""

    def __init__(self) -> None:
        self._usual: set[tuple[CodeType, str]] = set()
        self.of_weights = False
        """Are they not finite because of weights that are not?"""

    def healthy(self) -> None:
        """A backward pass begins in this thread, of a loss that is finite."""
        with contextlib.suppress(Exception), no_dispatch():  # objects may be of any kind
            for frame in _frames():
                names = locals_of(frame)
                finite = _Finite(names, {})
                self._usual.update(
                    (frame.f_code, name)
                    for name in list(names)[:_MOST_NAMES]
                    if not finite.is_so(name)
                )

    def made_by(self) -> Misuse | None:
        """The origin of a loss that is not finite: the variable and the line that were the first
        ("made_not_finite"), or the batch that had it already ("batch_not_finite"); ``None``: it is
        not known, as where weights are not finite any more."""
        misuse: Misuse | None = None
        with contextlib.suppress(Exception), no_dispatch():
            # What an outer function computed came before what it gave to an inner one.
            for frame in _frames():
                known = self._in_function(frame)
                if known is _BROKEN:
                    self.of_weights = True
                    return None
                misuse = known or misuse
        return misuse

    def may_be_made_by(self) -> Misuse | None:
        """The origin of weights that are not finite: the line that may have made them so, by its
        source."""
        return risky(_frames())

    def held(self) -> Misuse | None:
        """The misuse behind weights that are not finite: an array of the script that had a NaN when
        the loss was finite yet, and its row. (An infinity may be a mask.)"""
        with contextlib.suppress(Exception), no_dispatch():
            for frame in _frames():
                names = locals_of(frame)
                for name in (name for code, name in self._usual if code is frame.f_code):
                    row = _row_of_nan(names.get(name))
                    if row is not None:
                        return Misuse("sample_not_finite", (f"`{name}`, row {row}",))
        return None

    def _in_function(self, frame: FrameType) -> Misuse | None:
        code, names = frame.f_code, locals_of(frame)
        tree = function_syntax(code)
        if tree is None:
            return None
        usual = {name for known, name in self._usual if known is code}
        finite = _Finite(names, frame.f_globals, usual)
        for line, name, read, given in sorted(_last_made(tree, frame.f_lineno), key=_by_line):
            if name not in names or finite.is_so(name):
                continue
            if any(finite.is_broken(each) for each in read):
                return _BROKEN
            if all(finite.is_so(each) for each in read):
                place = relative_place(f"{code.co_filename}:{line}")
                if given:
                    return Misuse("batch_not_finite", (name,), place)
                values = (names.get(each, frame.f_globals.get(each)) for each in read)
                within = risky_in(values)
                told = () if within is None else (*within.told[:2], within.place or "")
                return Misuse("made_not_finite", (name, *told), place)
        return None


def _row_of_nan(value: Any) -> int | None:
    """The row of an array, or of a tensor that nothing was computed for, that has a NaN; ``None``:
    it has none."""
    if isinstance(value, torch.Tensor):
        is_known = value.device.type == "cpu" and value.is_floating_point() and value.is_leaf
        if not is_known or value.requires_grad or not value.dim():
            return None
        value = value.detach().to(torch.float32).numpy()
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or not value.ndim:
        return None
    rows = np.flatnonzero(np.isnan(value).reshape(len(value), -1).any(1))
    return int(rows[0]) if len(rows) else None


def _frames() -> list[FrameType]:
    """The frames of the script's functions that are called, the innermost first."""
    frame: FrameType | None = sys._getframe(2)
    frames: list[FrameType] = []
    while frame is not None and len(frames) < _FRAMES:
        if not is_library(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    return frames


class _Finite:
    """A look at which variables are finite, of those that a function can name."""

    def __init__(
        self, names: Mapping[str, Any], of_module: Mapping[str, Any], usual: Iterable[str] = ()
    ) -> None:
        self._names, self._module = names, of_module
        self._known = dict.fromkeys(usual, True)
        self._left = _MOST_NUMBERS

    def is_so(self, name: str) -> bool:
        if name not in self._known:
            self._known[name] = all(map(self._is_finite, _tensors(self._value(name))))
        return self._known[name]

    def is_broken(self, name: str) -> bool:
        """Is it a model, or what has one, whose weights are not finite?"""
        value = self._value(name)
        parts = [value, *_attributes(value)]
        models = [part for part in parts if isinstance(part, torch.nn.Module)]
        return any(
            not self._is_finite(parameter.detach())
            for model in models
            for parameter in torch.nn.Module.parameters(model)
        )

    def _value(self, name: str) -> Any:
        return self._names.get(name, self._module.get(name))

    def _is_finite(self, tensor: Any) -> bool:
        if isinstance(tensor, np.ndarray):
            size, is_known = tensor.size, tensor.dtype.kind == "f"
        else:
            is_known = tensor.device.type == "cpu" and tensor.layout is torch.strided
            size, is_known = tensor.numel(), is_known and tensor.is_floating_point()
        self._left -= size
        if not is_known or self._left < 0:
            return True
        if isinstance(tensor, np.ndarray):
            return bool(np.isfinite(tensor).all())
        return bool(torch.isfinite(tensor.detach()).all())


def _tensors(value: Any, depth: int = 3) -> Iterator[Any]:
    """The tensors of a batch, and of an object that has one."""
    kind = type(value)
    if issubclass(kind, torch.Tensor | np.ndarray):
        yield value
    elif depth and issubclass(kind, Mapping | list | tuple):
        parts: Iterable[Any] = value.values() if issubclass(kind, Mapping) else value
        for part, _ in zip(parts, range(_ENTRIES), strict=False):
            yield from _tensors(part, depth - 1)
    elif depth == 3 and not issubclass(kind, torch.nn.Module):
        for part in _attributes(value):
            if issubclass(type(part), torch.Tensor):
                yield part


def _attributes(value: Any) -> list[Any]:
    with contextlib.suppress(AttributeError, TypeError):  # it has none
        return list(object.__getattribute__(value, "__dict__").values())[:_ENTRIES]
    return []


# ---
# The source: which line made a variable, and of what.


_Made = tuple[int, str, set[str], bool]


def _by_line(each: _Made) -> int:
    return each[0]


def _last_made(tree: ast.AST, line: int) -> list[_Made]:
    """The last assignment of each variable up to a line: the line, the name, the names that it
    reads, and whether it is a round of a loop. One that hands on what it had does not count."""
    every = sorted(
        (each for node in _own_nodes(tree) for each in _made(node) if each[0] <= line),
        key=lambda each: each[0],
    )
    found: dict[str, _Made] = {}
    for each in every:
        if each[1] not in each[2]:
            found[each[1]] = each
    # What is made of itself may have been so before: nobody knows which of the two lines it was.
    again = {each[1] for each in every if each[1] in each[2] and each[0] > _line(found, each[1])}
    return [each for name, each in found.items() if name not in again]


def _line(found: Mapping[str, _Made], name: str) -> int:
    return found[name][0] if name in found else 0


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes without those of functions within."""
    waiting = list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _made(node: ast.AST) -> Iterator[_Made]:
    if isinstance(node, ast.For | ast.AsyncFor):
        for name in _stored(node.target):
            yield node.lineno, name, set(names_in(node.iter)), True
        return
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        targets, value = [node.target], node.value
    elif isinstance(node, ast.AugAssign):
        targets, value = [node.target], ast.Tuple([node.target, node.value], ast.Load())
    else:
        return
    pairs: list[tuple[ast.AST, ast.AST]] = []
    for target in targets:
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            pairs += zip(target.elts, value.elts, strict=True)
        else:
            pairs.append((target, value))
    for one, of in pairs:
        for name in _stored(one):
            read = set(names_in(of))
            if name in read and _hands_on(of):
                continue
            given = isinstance(of, ast.Call) and getattr(of.func, "id", "") == "next"
            yield node.lineno, name, read, given


def _stored(target: ast.AST) -> list[str]:
    """The names of a target that is no attribute and no entry."""
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    found = [part.id for part in parts if isinstance(part, ast.Name)]
    return found + [name for part in parts if hasattr(part, "elts") for name in _stored(part)]


def _hands_on(value: ast.AST) -> bool:
    """``x.to(device)``, ``batch[0]``, ``{name: x.to(device) for …}``: numbers as they were."""
    nodes = list(ast.walk(value))
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    return not any(isinstance(node, ast.BinOp | ast.UnaryOp) for node in nodes) and all(
        isinstance(call, ast.Attribute) and call.attr in _SAME for call in calls
    )
