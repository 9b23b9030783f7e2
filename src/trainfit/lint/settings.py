"""Settings and habits that are meant, and have a cost or an effect that figures need to say:
deterministic algorithms, a script's own search for what fits."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from trainfit.lint.imports import Source
from trainfit.lint.index import line_finding
from trainfit.results.findings import Finding

#: The kind of a script that tries less where memory runs out.
TRIES_LESS: Final = "tries-less"
#: What makes something half as large.
_HALVES: Final = (ast.FloorDiv, ast.Div, ast.RShift)
_LOOPS: Final = (ast.For, ast.While)


def deterministic(source: Source) -> Iterator[Finding]:
    """Lines that ask for deterministic algorithms, of a file of a run that had them on."""
    for node in source.nodes:
        if isinstance(node, ast.Assign | ast.Call) and _is_deterministic(node):
            yield line_finding(
                source,
                node,
                "deterministic",
                f"{source.short(node)}: only algorithms whose results repeat bit by bit, which are "
                "often slower; by how much is not predicted",
                "convolutions' backward passes, index_add, scatter and attention have faster "
                "algorithms that add in another order in each run.",
                "leave it out where runs need not repeat bit by bit (seeds stay), and compare the "
                "step's time",
                "info",
            )


def tries_less(source: Source) -> Iterator[Finding]:
    """Loops that make something half as large where memory runs out, in a file of a run that does
    not fit."""
    for node in source.nodes:
        if isinstance(node, _LOOPS) and (call := _tried_with_less(node)) is not None:
            yield line_finding(
                source,
                call,
                TRIES_LESS,
                "The script itself tries less where memory runs out: these figures are of the "
                "size that the command gives, which it tries first",
                "each try that fails costs the time up to its error, and may leave memory behind.",
                "begin with a size that fits",
                "warning",
            )


def _is_deterministic(node: ast.Assign | ast.Call) -> bool:
    """``torch.backends.cudnn.deterministic = True``, ``use_deterministic_algorithms(True)``."""
    if isinstance(node, ast.Assign):
        is_on = isinstance(node.value, ast.Constant) and node.value.value is True
        return is_on and ast.unparse(node.targets[0]).endswith("cudnn.deterministic")
    if not ast.unparse(node.func).endswith("use_deterministic_algorithms") or not node.args:
        return False
    return isinstance(node.args[0], ast.Constant) and node.args[0].value is True


def _tried_with_less(loop: ast.For | ast.While) -> ast.stmt | None:
    """What a loop tries, if it makes something half as large where memory runs out."""
    inside = list(ast.walk(loop))
    if not any(map(_halves, inside)):
        return None
    tries = (each for each in inside if isinstance(each, ast.Try))
    tried = (each.body[0] for each in tries if any(map(_of_memory, each.handlers)))
    return next(tried, None)


def _of_memory(handler: ast.ExceptHandler) -> bool:
    """Does it handle that memory ran out?"""
    kind = ast.unparse(handler.type) if handler.type is not None else ""
    if "OutOfMemory" in kind:
        return True
    is_told = "out of memory" in " ".join(map(ast.unparse, handler.body))
    return is_told and any(each in kind for each in ("RuntimeError", "Exception"))


def _halves(node: ast.AST) -> bool:
    if isinstance(node, ast.AugAssign):
        is_by_half = isinstance(node.op, ast.Mult) and _is_number(node.value, below=1)
        return (isinstance(node.op, _HALVES) and _is_number(node.value)) or is_by_half
    if not isinstance(node, ast.Assign):
        return False
    return any(
        isinstance(each, ast.BinOp)
        and (
            (isinstance(each.op, _HALVES) and _is_number(each.right))
            or (isinstance(each.op, ast.Mult) and _is_number(each.right, below=1))
        )
        for each in ast.walk(node.value)
    )


def _is_number(node: ast.expr, below: float = float("inf")) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, int | float) and value < below
