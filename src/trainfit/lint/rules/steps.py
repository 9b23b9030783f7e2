"""Rules on the optimizer's step: gradients never cleared, cleared to zeros, graphs retained."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from trainfit.lint.reading.index import Index, Loop, inside, is_literal, keyword, method_of
from trainfit.lint.reading.project import Project
from trainfit.lint.rules.making import finding
from trainfit.results.machine.doctor import Finding


def zero_grad(project: Project) -> Iterator[Finding]:
    """No zero_grad anywhere, or zero_grad(set_to_none=False) in each step."""
    yield from _kept_as_zeros(project)
    if project.manager or project.hides_training or "zero_grad" in project.words:
        return
    if "grad" in project.words or "lbfgs" in project.words:
        return  # gradients are handled by hand
    for index, call in project.calls():
        if method_of(call) != "step" or project.step_region(index, call) is None:
            continue
        assert isinstance(call.func, ast.Attribute)
        if project.value(call.func.value).kind != "optimizer" or call.args:
            continue
        name = index.file.source.text(call.func.value)
        yield finding(
            "zero-grad-missing",
            index,
            call,
            "Nothing in the script clears the gradients, so backward() adds every step's"
            " gradients to those of all previous steps: each step uses the sum over the whole run.",
            f"{index.file.source.line(call.lineno).strip()} followed by {name}.zero_grad()",
        )
        return


def retain_graph(project: Project) -> Iterator[Finding]:
    """backward(retain_graph=True) where no second backward pass can go through the graph."""
    for loop, index in project.training_loops.items():
        call = _only_backward(project, index, loop)
        if call is None or not is_literal(keyword(call, "retain_graph"), True):
            continue
        if not _is_made_in(project, loop):
            continue
        kept = [k for k in call.keywords if k.arg != "retain_graph"]
        source = index.file.source
        given = [source.text(each) for each in call.args]
        given += [f"{k.arg}={source.text(k.value)}" for k in kept]
        new = f"{source.text(call.func)}({', '.join(given)})"
        yield finding(
            "retain-graph",
            index,
            call,
            "retain_graph=True keeps every activation after the step's only backward pass, so "
            "they are still allocated while the next step runs: memory for two steps instead of "
            "one. (If it fails without, a tensor is carried over between steps: detach() it.)",
            source.replaced(call, new),
        )


def _kept_as_zeros(project: Project) -> Iterator[Finding]:
    if "cudagraph" in project.words or "make_graphed_callables" in project.words:
        return
    for index, call in project.calls():
        if method_of(call) != "zero_grad" or project.step_region(index, call) is None:
            continue
        setting = keyword(call, "set_to_none")
        if not is_literal(setting, False):
            continue
        assert isinstance(call.func, ast.Attribute)
        source = index.file.source
        yield finding(
            "zero-grad-to-zeros",
            index,
            call,
            "set_to_none=False keeps every gradient allocated during the next"
            " forward pass, when activations peak, and fills it with zeros only for backward()"
            " to add to.",
            source.replaced(call, f"{source.text(call.func)}()"),
        )


def _only_backward(project: Project, index: Index, loop: Loop) -> ast.Call | None:
    scope = index.scope(loop)
    if scope is None or {"autograd", "create_graph"} & project.words:
        return None
    calls = project.backwards(scope)
    return calls[0] if len(calls) == 1 and next(index.loops(calls[0]), None) is loop else None


def _is_made_in(project: Project, loop: Loop) -> bool:
    """Is every graph in the loop made in the same pass: no tensor from before is used?"""
    stored = {
        each.id
        for node in inside(loop)
        for each in [node]
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    applied = False
    for node in inside(loop):
        if isinstance(node, ast.Call) and project.value(node.func).kind == "module":
            applied = True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in stored:
            value = project.value(node)
            if value.is_tensors and value.graph:
                return False
    return applied
