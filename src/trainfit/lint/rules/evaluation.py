"""Rule on evaluation with autograd enabled."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from trainfit.lint.reading.grad import Gradients
from trainfit.lint.reading.index import Index, Scope, inside, method_of, path_of
from trainfit.lint.reading.project import Project
from trainfit.lint.rules.making import finding
from trainfit.results.machine.doctor import Finding

_EVALUATES: Final = re.compile(
    r"(^|_)(eval|evaluate|evaluation|valid|validate|validation|test)(_|$)"
)
#: Where gradients of an evaluated network are wanted.
_WANTS_GRADIENTS: Final = frozenset({"backward", "grad", "vjp", "jvp", "jacobian", "hessian"})


def no_no_grad(project: Project) -> Iterator[Finding]:
    """A network in eval() mode (or in a function named so) called with gradients recorded."""
    gradients = Gradients(project)
    frozen = _frozen(project)
    for index in project.indexes:
        for function in index.functions:
            call = _first(project, index, function, gradients, frozen)
            if call is not None and not _uses_gradients(project, index, function):
                yield _found(index, function, call)
        tree = index.file.source.tree
        call = _first(project, index, tree, gradients, frozen)
        if call is None or next(index.loops(call), None) is None:
            continue  # what a single call gives may be used in any way
        if not _uses_gradients(project, index, _from(tree, call)):
            yield _found(index, tree, call)


def _from(tree: ast.Module, node: ast.expr) -> ast.Module:
    """A module's statements from the one on that a node stands in: what is before is over."""
    end = node.lineno
    return ast.Module([each for each in tree.body if (each.end_lineno or end) >= end], [])


def _found(index: Index, scope: Scope, call: ast.Call) -> Finding:
    loop = next(index.loops(call), None)
    line = index.file.source.line((loop or call).lineno).strip()
    around = f"`with torch.inference_mode():` around `{line}`"
    who = "The script"
    if not isinstance(scope, ast.Module):
        who = f"{scope.name}()"
        around = f"@torch.inference_mode() above `def {scope.name}`, or {around}"
    return finding(
        "no-no-grad",
        index,
        call,
        f"{who} evaluates the network with autograd enabled: every layer's activations"
        " are kept for a backward pass that never runs. That costs memory (often most of what"
        " training needs) and time; eval() does not disable it.",
        around,
    )


def _first(
    project: Project,
    index: Index,
    scope: Scope,
    gradients: Gradients,
    frozen: frozenset[str],
) -> ast.Call | None:
    """The first call of a network that evaluates with gradients, if there certainly is one."""
    named = bool(_EVALUATES.search(getattr(scope, "name", "").lower()))
    calls = sorted(
        (n for n in inside(scope) if isinstance(n, ast.Call)),
        key=lambda n: (n.lineno, n.col_offset),
    )
    modes = _modes(calls)
    if not named and not modes:
        return None
    for call in calls:
        path = path_of(call.func)
        if not path or path in frozen or project.value(call.func).kind != "module":
            continue
        if _is_loss(project, call):
            continue
        mode = [text for line, where, text in modes if where == path and line < call.lineno]
        evaluates = mode[-1] == "eval" if mode else named and bool(next(index.loops(call), None))
        if evaluates and gradients.at(index, call) == "on":
            return call
    return None


def _is_loss(project: Project, call: ast.Call) -> bool:
    """A loss has no parameters: its graph is only that of its arguments."""
    made = project.value(call.func).call
    name = path_of(made.func) if isinstance(made, ast.Call) else path_of(call.func)
    last = name.rpartition(".")[2].lower()
    return last.endswith(("loss", "criterion", "metric", "loss_fn", "transform", "normalize"))


def _modes(calls: list[ast.Call]) -> list[tuple[int, str, str]]:
    """(line, network, "eval" or "train") among calls, in order."""
    return [
        (call.lineno, path_of(call.func.value), call.func.attr)
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and (call.func.attr == "train" or (call.func.attr == "eval" and not call.args))
    ]


def _uses_gradients(project: Project, index: Index, function: Scope) -> bool:
    """Do the statements, or a function that they call, or what they return, use gradients?"""
    for node in ast.walk(function):
        name = getattr(node, "attr", None) or getattr(node, "id", "")
        if name in _WANTS_GRADIENTS or str(name).startswith("requires_grad"):
            return True
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if isinstance(node, ast.Return) and any(project.value(e).graph for e in ast.walk(node)):
            return True  # the caller may go backward
        if isinstance(node, ast.Call):
            callee = project.callee(index, node)
            if callee is not None and project.backwards(callee):
                return True
    return False


def _frozen(project: Project) -> frozenset[str]:
    """Networks whose parameters are frozen somewhere: no graph is recorded for them."""
    found: set[str] = set()
    for index, call in project.calls():
        if method_of(call) == "requires_grad_":
            assert isinstance(call.func, ast.Attribute)
            found.add(path_of(call.func.value))
        elif method_of(call) in {"parameters", "named_parameters"}:
            loop = index.parents.get(call)
            if isinstance(loop, ast.For) and _freezes(loop):
                assert isinstance(call.func, ast.Attribute)
                found.add(path_of(call.func.value))
    return frozenset(found)


def _freezes(loop: ast.For) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr.startswith("requires_grad")
        for node in ast.walk(loop)
    )
