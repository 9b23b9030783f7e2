"""Rule on tensors kept across steps with their autograd graph."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from trainfit.lint.reading.grad import Gradients
from trainfit.lint.reading.index import Function, Index, Loop, inside, method_of, path_of
from trainfit.lint.reading.project import Project
from trainfit.lint.rules.making import finding
from trainfit.results.machine.doctor import Finding


def loss_kept_with_graph(project: Project) -> Iterator[Finding]:
    """`total += loss` and `losses.append(loss)` in a training loop, the loss not detached."""
    gradients = Gradients(project)
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
                yield _found(index, node, value)


def _found(index: Index, node: ast.AST, value: ast.expr) -> Finding:
    assert isinstance(node, ast.expr | ast.stmt)
    source = index.file.source
    return finding(
        "loss-kept-with-graph",
        index,
        node,
        f"`{source.text(value)}` is kept with its autograd graph, so every step's graph stays "
        "alive until the loop's result is deleted: memory grows with every step, on the host by "
        "the graph's nodes, on the GPU by what backward() has not freed.",
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
    made = [
        node
        for node in inside(scope)
        if isinstance(node, ast.Assign) and any(path_of(each) == target for each in node.targets)
    ]
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
    for each in node.targets:
        yield from each.elts if isinstance(each, ast.Tuple | ast.List) else (each,)


def _goes_backward(index: Index, loop: Loop) -> frozenset[str]:
    """Names whose values a backward pass (or another use of the graph) may go through."""
    scope: Function | ast.Module | None = index.scope(loop)
    nodes = list(ast.walk(scope)) if scope is not None else []
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Call) and _uses_graph(node):
            found |= _names(node)
    assigned = [node for node in nodes if isinstance(node, ast.Assign | ast.AugAssign)]
    while True:
        more = set(found)
        for node in assigned:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(_names(each) & found for each in targets):
                more |= _names(node.value)
        if more == found:
            return frozenset(found)
        found = more


def _uses_graph(call: ast.Call) -> bool:
    name = call.func.id if isinstance(call.func, ast.Name) else method_of(call)
    return name == "grad" or "backward" in name


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - {"self"}
