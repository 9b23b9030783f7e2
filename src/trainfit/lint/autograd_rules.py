"""Rules on autograd: evaluation with it enabled, tensors kept with their graph across steps."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Final

from trainfit.findings.habits import KEPT_GRAPHS
from trainfit.findings.source_code import names_in
from trainfit.lint.index import (
    Function,
    Index,
    Loop,
    Scope,
    assignments,
    finding,
    inside,
    method_of,
    path_of,
)
from trainfit.lint.project import GradientModes, Project
from trainfit.results.findings import Finding

_EVALUATES: Final = re.compile(
    r"(^|_)(eval|evaluate|evaluation|valid|validate|validation|test)(_|$)"
)
#: Where gradients of an evaluated network are wanted.
_WANTS_GRADIENTS: Final = frozenset({"backward", "grad", "vjp", "jvp", "jacobian", "hessian"})


def no_no_grad(project: Project) -> Iterator[Finding]:
    """A network in eval() mode (or in a function named so) called with gradients recorded."""
    gradients = GradientModes(project)
    frozen = _frozen(project)
    for index in project.indexes:
        for function in index.functions:
            call = _first(project, index, function, gradients, frozen)
            if call is None:
                continue
            if not _uses_gradients(project, index, function) or _ends_in_its_loop(
                project, index, function, call
            ):
                yield _evaluated_with_autograd(index, function, call)
        tree = index.file.source.tree
        call = _first(project, index, tree, gradients, frozen)
        if call is None or next(index.loops(call), None) is None:
            continue  # what a single call gives may be used in any way
        if not _uses_gradients(project, index, _from(tree, call)) or _ends_in_its_loop(
            project, index, tree, call
        ):
            yield _evaluated_with_autograd(index, tree, call)


def _ends_in_its_loop(project: Project, index: Index, scope: Scope, call: ast.Call) -> bool:
    """Do gradients of what a loop of evaluation computes get nowhere, whatever else the function or
    the script does, which may train as well?"""
    loop = next(index.loops(call), None)
    if loop is None or _uses_gradients(project, index, loop):
        return False
    # What is made of that later, also in the next round of a loop around both.
    kept = _followed(_kept_of(loop), ((_set_by(e), _names(e.value)) for e in _assigned(scope)))
    for node in inside(scope):
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) and _names(node) & kept:
            return False
        name = getattr(node, "attr", None) or getattr(node, "id", "")
        if name not in _WANTS_GRADIENTS:
            continue
        around = next(index.loops(node), None)
        # A loop of its own assigns what it goes backward through.
        is_own = around is not None and around not in index.loops(call)
        own = _made_in(around) if around is not None and is_own else set()
        statement = next(
            (each for each, _ in index.ancestors(node) if isinstance(each, ast.stmt)), node
        )
        if _names(statement) & kept - own:
            return False
    return True


def _assigned(scope: ast.AST) -> Iterator[ast.Assign | ast.AugAssign]:
    for node in inside(scope):
        if isinstance(node, ast.Assign | ast.AugAssign):
            yield node


def _set_by(node: ast.Assign | ast.AugAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {name for target in targets for name in _names(target)}


def _followed(names: set[str], steps: Iterable[tuple[set[str], set[str]]]) -> set[str]:
    """``names`` and all that they lead to: of each step what it adds, and names of which one
    suffices for that."""
    pairs, found = list(steps), set(names)
    while more := {name for adds, of in pairs if of & found for name in adds} - found:
        found |= more
    return found


def _made_in(loop: Loop) -> set[str]:
    """Names that the statements of a loop assign."""
    every = (assignment for assignment in inside(loop) if isinstance(assignment, ast.Assign))
    return {name for assignment in every for name in _set_by(assignment)}


def _kept_of(loop: Loop) -> set[str]:
    """Names that a loop assigns, adds to, or calls a method of (`outputs.append(…)`)."""
    found = _made_in(loop)
    for each in inside(loop):
        if isinstance(each, ast.AugAssign):
            found |= _set_by(each)
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.args:
            found |= _names(each.func.value)
    return found


def _from(tree: ast.Module, node: ast.expr) -> ast.Module:
    """A module's statements from the one on that a node stands in: what is before is over."""
    end = node.lineno
    return ast.Module([each for each in tree.body if (each.end_lineno or end) >= end], [])


def _evaluated_with_autograd(index: Index, scope: Scope, call: ast.Call) -> Finding:
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
    gradients: GradientModes,
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


def _uses_gradients(project: Project, index: Index, function: Scope | Loop) -> bool:
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


# ---
# Rule on tensors kept across steps with their autograd graph.


def loss_kept_with_graph(project: Project) -> Iterator[Finding]:
    """`total += loss` and `losses.append(loss)` in a training loop, the loss not detached."""
    gradients = GradientModes(project)
    for loop, index in project.training_loops.items():
        used = _goes_backward(index, loop)
        for statement in loop.body:
            for node in inside(statement):
                kept = _kept(project, node)
                if kept is None or next(index.loops(node), None) is not loop:
                    continue
                target, value = kept
                name = target.partition(".")[0]
                if name in used or target in used or _is_made_in(loop, target):
                    continue
                if not _is_list(node) and gradients.inside(index, node) != "on":
                    continue  # the sum has no graph
                if _is_list(node) and not _is_plain_list(project, index, loop, target):
                    continue
                yield _kept_with_graph(index, node, value)


def _kept_with_graph(index: Index, node: ast.AST, value: ast.expr) -> Finding:
    assert isinstance(node, ast.expr | ast.stmt)
    source = index.file.source
    return finding(
        "loss-kept-with-graph",
        index,
        node,
        f"`{source.text(value)}`: {KEPT_GRAPHS.cause}.",
        source.replaced(value, f"{_bracketed(source.text(value), value)}.detach()"),
    )


def _bracketed(text: str, node: ast.expr) -> str:
    simple = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    return text if simple else f"({text})"


def _kept(project: Project, node: ast.AST) -> tuple[str, ast.expr] | None:
    """(what keeps, what is kept), where the latter certainly holds a graph."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        target, value = path_of(node.target), node.value
    elif (
        isinstance(node, ast.Assign)
        and len(node.targets) == 1
        and isinstance(node.value, ast.BinOp)
        and isinstance(node.value.op, ast.Add)
        and path_of(node.targets[0])
        and path_of(node.targets[0]) == path_of(node.value.left)
    ):
        target, value = path_of(node.targets[0]), node.value.right
    elif _is_list(node):
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        target, value = path_of(node.func.value), node.args[0]
    else:
        return None
    found = project.value(value)
    return (target, value) if target and found.kind == "tensor" and found.graph else None


def _is_list(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and method_of(node) == "append" and len(node.args) == 1


def _is_plain_list(project: Project, index: Index, loop: Loop, target: str) -> bool:
    """Is it a list that was made before the loop and is not emptied in it?"""
    scope = index.scope(loop)
    if scope is None or "." in target:
        return False
    made = assignments(inside(scope), target)
    for node in inside(loop):
        empties = isinstance(node, ast.Call) and method_of(node) in {"clear", "pop", "popleft"}
        if isinstance(node, ast.Delete) or (empties and path_of(node.func.value) == target):  # type: ignore[attr-defined]
            return False
    return bool(made) and all(
        (isinstance(node.value, ast.List) and not node.value.elts)
        or (isinstance(node.value, ast.Call) and path_of(node.value.func) == "list")
        for node in made
    )


def _is_made_in(loop: Loop, target: str) -> bool:
    """Does each pass of the loop restart it?"""
    for node in inside(loop):
        if not isinstance(node, ast.Assign):
            continue
        adds = isinstance(node.value, ast.BinOp) and path_of(node.value.left) == target
        if not adds and any(path_of(each) == target for each in _targets(node)):
            return True
    return False


def _targets(node: ast.Assign) -> Iterator[ast.expr]:
    for target in node.targets:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else (target,)


def _goes_backward(index: Index, loop: Loop) -> frozenset[str]:
    """Names whose values a backward pass (or another use of the graph) may go through."""
    scope: Function | ast.Module | None = index.scope(loop)
    nodes = list(ast.walk(scope)) if scope is not None else []
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Call) and _uses_graph(node):
            found |= _names(node)
    assigned = [node for node in nodes if isinstance(node, ast.Assign | ast.AugAssign)]
    return frozenset(_followed(found, ((_names(e.value), _set_by(e)) for e in assigned)))


def _uses_graph(call: ast.Call) -> bool:
    name = call.func.id if isinstance(call.func, ast.Name) else method_of(call)
    return name == "grad" or "backward" in name


def _names(node: ast.AST) -> set[str]:
    return set(names_in(node)) - {"self"}
