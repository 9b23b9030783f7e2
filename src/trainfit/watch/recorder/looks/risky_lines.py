"""Lines of what a loss is computed by that are not defined everywhere: a logarithm, a square root,
a division by a sum, a mask of -inf. Where weights are not finite any more, what broke them is not
seen, and the source alone tells where it may have been.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import re
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

import torch

from trainfit.findings.source_code import function_syntax, names_in, relative_place
from trainfit.results.runs.learning import Misuse
from trainfit.simgpu.device.user_location import is_library, locals_of

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
    found: _Codes = {}
    for model in [each for each in values if isinstance(each, torch.nn.Module)]:
        for part, _ in zip(model.modules(), range(_MODULES), strict=False):
            forward = getattr(type(part), "forward", None)
            if isinstance(forward, FunctionType):
                found[forward.__code__] = 0, forward.__globals__
    return found


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
        (name, each)
        for each in ast.walk(tree)
        if isinstance(each, ast.Assign | ast.AugAssign | ast.AnnAssign) and each.lineno <= line
        for name in names_in(each, ast.Store)
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
            sums = {_called(each) for each in ast.walk(node.right) if isinstance(each, ast.Call)}
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
