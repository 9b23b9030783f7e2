"""Lines of a script whose result is lost: a tensor that is moved and not kept, losses that the next
pass replaces, parameters that get a name in place of numbers, a loop that its first pass ends, a
split whose parts share what is set for one."""

from __future__ import annotations

import ast
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Final

from trainfit.findings.source_code import names_in
from trainfit.lint.imports import Source
from trainfit.lint.index import (
    Index,
    assigned_calls,
    finding,
    is_literal,
    line_finding,
    method_of,
    path_of,
)
from trainfit.lint.project import Project
from trainfit.results.findings import Finding

#: Methods that give another tensor: of modules, which they change, they have the same names.
_MOVES: Final = {"to", "cuda", "cpu", "float", "half", "double", "bfloat16", "long", "type"}
#: … and those that no module has.
_OF_TENSORS: Final = {
    *("clamp", "clip", "contiguous", "detach", "flatten", "permute", "reshape", "squeeze"),
    *("transpose", "unsqueeze", "view"),
}
#: Methods that give the parameters of a module, or their names with them.
_PARAMETERS: Final = {"parameters", "named_parameters"}
#: Words in names of labels, and of samples.
_LABELS: Final = {"y", "label", "labels", "target", "targets"}
_SAMPLES: Final = {"x", "data", "features", "images", "inputs", "samples", "texts"}
#: What makes the next shuffle that of before.
_SAME_ORDER: Final = {"seed", "set_state", "setstate", "manual_seed", "default_rng", "Random"}


def result_dropped(project: Project) -> Iterator[Finding]:
    """``x.to(device)`` as a statement."""
    for index, call in project.calls():
        if method_of(call) not in _MOVES | _OF_TENSORS or not isinstance(call.func, ast.Attribute):
            continue
        of, parent = call.func.value, index.parents.get(call)
        if not isinstance(parent, ast.Expr) or not _is_tensor(project, index, of):
            continue
        if not isinstance(of, ast.Subscript) and not path_of(of):
            continue  # made for this line alone, as a first use of the GPU is
        text = index.file.source.text(call)
        name = path_of(of) or "x"
        found = finding(
            "result-dropped",
            index,
            call,
            "the method gives another tensor and leaves this one as it is, other than a module's "
            ".to(), which changes the module.",
            f"{name} = {text}",
        )
        yield _critical(found, f"{text} changes nothing: its result is not kept")


def _is_tensor(project: Project, index: Index, node: ast.expr) -> bool:
    """Is it surely one? A loader may give an object that moves itself, but hardly as a part."""
    kind = project.value(node).kind
    if kind == "tensor":
        return True
    if kind != "batch":
        return False
    if isinstance(node, ast.Subscript):
        return True
    return isinstance(node, ast.Name) and any(
        each.id == node.id
        for loop in index.loops(node)
        if isinstance(loop, ast.For)
        for part in ast.walk(loop.target)
        if isinstance(part, ast.Tuple)
        for each in part.elts
        if isinstance(each, ast.Name)
    )


def steps_after_loop(project: Project) -> Iterator[Finding]:
    """``loss.backward()`` behind the loop over batches that computes the loss."""
    for index, call in project.calls():
        if method_of(call) != "backward" or not isinstance(call.func, ast.Attribute):
            continue
        name, line = path_of(call.func.value), index.parents.get(call)
        outer = index.parents.get(line) if isinstance(line, ast.Expr) else None
        if not name or not isinstance(outer, ast.For | ast.While):
            continue
        for loop in outer.body:
            if loop.lineno < call.lineno and isinstance(loop, ast.For):
                made = _made_each_pass(project, loop, name)
                if made is not None:
                    yield _late(index, call, loop, made)


def _made_each_pass(project: Project, loop: ast.For, name: str) -> ast.Assign | None:
    """The assignment by which each pass of a loop over batches gives ``name`` a value that the next
    one replaces."""
    targets = [node for node in ast.walk(loop.target) if isinstance(node, ast.Name)]
    if not any(project.value(target).kind == "batch" for target in targets):
        return None
    nodes = [each for line in loop.body for each in ast.walk(line)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    if any(method_of(call) in ("append", "backward", "step") for call in calls):
        return None
    if any(isinstance(node, ast.Break | ast.Return | ast.Yield) for node in nodes):
        return None
    made = [
        node
        for node in nodes
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr)
        and name in names_in(node, ast.Store)
    ]
    always = [node for line in loop.body for node in (line, *_within(line))]
    only = made[0] if len(made) == 1 and made[0] in always else None
    if not isinstance(only, ast.Assign) or name in names_in(only.value, ast.Load):
        return None
    return only


def _within(line: ast.stmt) -> list[ast.stmt]:
    return line.body if isinstance(line, ast.With) else []


def _late(index: Index, call: ast.Call, loop: ast.For, made: ast.Assign) -> Finding:
    source = index.file.source
    text = source.text(call)
    found = finding(
        "steps-after-loop",
        index,
        call,
        f"the line is behind the loop at line {loop.lineno}, each pass of which replaces the loss "
        f"of the one before (line {made.lineno}).",
        f"indent {text} and the optimizer's step as line {made.lineno}, into that loop",
    )
    return _critical(found, f"Only the last batch of each pass trains: {text} is behind the loop")


def drops_results(source: Source) -> bool:
    """Is there a line that :func:`result_dropped` may be about?"""
    return any(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and method_of(node.value) in _MOVES | _OF_TENSORS
        for node in source.nodes
    )


def _critical(finding: Finding, title: str) -> Finding:
    return dataclasses.replace(finding, severity="critical", title=title)


def has_late_steps(source: Source) -> bool:
    """Is there a line that :func:`steps_after_loop` may be about?"""
    return any(
        isinstance(line, ast.For)
        and any(method_of(call) == "backward" for call in _statements(node.body[number:]))
        for node in source.nodes
        if isinstance(node, ast.For | ast.While)
        for number, line in enumerate(node.body)
    )


def _statements(lines: list[ast.stmt]) -> list[ast.Call]:
    return [
        line.value
        for line in lines
        if isinstance(line, ast.Expr) and isinstance(line.value, ast.Call)
    ]


def lost_lines(source: Source) -> Iterator[Finding]:
    """All others in a file."""
    for node in source.nodes:
        if isinstance(node, ast.For):
            yield from _rebound(source, node)
            yield from _ends_first(source, node)
    yield from _shared(source)
    yield from _left_off(source)
    yield from _shuffled_apart(source)
    yield from _split_order(source)


def _rebound(source: Source, loop: ast.For) -> Iterator[Finding]:
    """``p = p - lr * p.grad`` in a loop over parameters."""
    given = [call for call in ast.walk(loop.iter) if isinstance(call, ast.Call)]
    if not any(method_of(call) in _PARAMETERS for call in given):
        return
    names = names_in(loop.target, ast.Store)
    for number, line in enumerate(loop.body):
        if not isinstance(line, ast.Assign) or not isinstance(line.targets[0], ast.Name):
            continue
        name = line.targets[0].id
        if name not in names or name not in names_in(line.value, ast.Load):
            continue
        after = (*loop.body[number + 1 :], *loop.orelse)
        if any(name in names_in(each, ast.Load) for each in after):
            continue  # a name for what comes next
        yield line_finding(
            source,
            line,
            "parameter-rebound",
            f"{source.short(line)} changes no parameter: the name stands for a new tensor from "
            "then on, and the loop goes on to the next",
            "= gives a name another tensor; the model has the old one.",
            f"under torch.no_grad(): {name}.copy_({source.text(line.value)}), or an operator in "
            f"place ({name} -= …, {name}.mul_(…))",
        )


def _ends_first(source: Source, loop: ast.For) -> Iterator[Finding]:
    """A sum over a loop that returns at the end of its first pass."""
    last = loop.body[-1]
    if isinstance(last, ast.Break):
        yield from _breaks_first(source, loop, last)
    if not isinstance(last, ast.Return) or last.value is None:
        return
    inside = [each for line in loop.body for each in ast.walk(line)]
    if any(isinstance(node, ast.Continue | ast.Yield) for node in inside):
        return
    sums = {
        node.target.id
        for node in loop.body
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    }
    if not sums.intersection(names_in(last.value, ast.Load)):
        return
    yield line_finding(
        source,
        last,
        "loop-ends-first",
        f"{source.text(last)} ends the loop at line {loop.lineno} in its first pass: what is "
        "summed is that of one batch",
        "the line is within the loop.",
        "indent it as the loop itself, so that it comes after the last pass",
    )


def _breaks_first(source: Source, loop: ast.For, last: ast.Break) -> Iterator[Finding]:
    """A loop over batches that trains, and ends with ``break``."""
    inside = [each for line in loop.body for each in ast.walk(line)]
    methods = {method_of(call) for call in inside if isinstance(call, ast.Call)}
    if not {"backward", "step"} <= methods or any(
        isinstance(node, ast.Continue) for node in inside
    ):
        return
    found = line_finding(
        source,
        last,
        "loop-breaks-first",
        f"break ends the loop at line {loop.lineno} in its first pass: each epoch trains on one "
        "batch",
        "the line is within the loop, under no condition.",
        "leave it out, or put it under the condition that is meant: if step == max_steps: break",
    )
    yield dataclasses.replace(found, severity="warning")


def _shared(source: Source) -> Iterator[Finding]:
    """``val.dataset.transform = …`` of a part that random_split gave."""
    parts: dict[str, tuple[str, ...]] = {}
    assigned: list[tuple[ast.Assign, str]] = []
    nodes = sorted(
        (device_node for device_node in source.nodes if isinstance(device_node, ast.Assign)),
        key=lambda each: each.lineno,
    )
    for node in nodes:
        target = node.targets[0]
        call = node.value
        if isinstance(call, ast.Call) and path_of(call.func).rpartition(".")[2] == "random_split":
            if isinstance(target, ast.Tuple):
                names = tuple(each.id for each in target.elts if isinstance(each, ast.Name))
                parts |= dict.fromkeys(names, names)
            continue
        path = path_of(target)
        owner, _, rest = path.partition(".")
        if rest == "dataset":
            parts.pop(owner, None)  # a data set of its own (copy.copy)
        elif owner in parts and rest.startswith("dataset.") and "transform" in rest:
            assigned.append((node, owner))
    values = {ast.dump(node.value) for node, _ in assigned}
    if len(assigned) > 1 and len(values) == 1:
        return  # one for all
    for node, owner in assigned[-1:]:
        others = ", ".join(name for name in parts.get(owner, ()) if name not in (owner, "_"))
        if not others:
            continue
        yield line_finding(
            source,
            node,
            "transform-shared",
            f"{source.short(node)} is for {others} as well: the parts of random_split are indices "
            "into one and the same data set",
            "what is set last holds for all parts.",
            "a data set for each, with its own transform, and the same indices: "
            "Subset(Data(transform=train), indices), Subset(Data(transform=test), others)",
        )


def _left_off(source: Source) -> Iterator[Finding]:
    """``torch.set_grad_enabled(False)`` as a statement that nothing takes back."""
    nodes = [node for node in source.nodes if isinstance(node, ast.Call)]
    switches = [node for node in nodes if path_of(node.func).endswith("set_grad_enabled")]
    if any(path_of(node.func).endswith("enable_grad") for node in nodes):
        return
    if not any(method_of(node) == "backward" for node in nodes):
        return
    if len(switches) != 1 or not is_literal(next(iter(switches[0].args), None), False):
        return
    for owner in source.nodes:
        if not isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not any(switches[0] is call for call in _statements(owner.body)):
            continue
        inside = [call for call in ast.walk(owner) if isinstance(call, ast.Call)]
        if any(method_of(call) == "backward" for call in inside):
            continue
        text = source.text(switches[0])
        yield line_finding(
            source,
            switches[0],
            "gradients-left-off",
            f"{text} in {owner.name}() holds after it, too: the next loss has no graph",
            "no line switches gradients on, and backward() after the function fails.",
            f"with torch.no_grad(): around what {owner.name}() computes, or @torch.no_grad() "
            "before it",
        )


def _shuffled_apart(source: Source) -> Iterator[Finding]:
    """``np.random.shuffle(X)`` and ``np.random.shuffle(y)``, of which pairs are made after that."""
    for lines in _bodies(source):
        shuffled: list[tuple[ast.Call, str]] = []
        for line in lines:
            calls = [node for node in ast.walk(line) if isinstance(node, ast.Call)]
            if any(method_of(node) in _SAME_ORDER for node in calls):
                shuffled.clear()
            call = line.value if isinstance(line, ast.Expr) else None
            if not isinstance(call, ast.Call) or method_of(call) != "shuffle":
                continue
            if len(call.args) == 1 and (name := path_of(call.args[0])):
                shuffled.append((call, name))
        for (first, one), (second, other) in itertools.pairwise(shuffled):
            if {_role(one), _role(other)} != {"x", "y"}:
                continue  # two of one kind may be matched at random, as the ends of edges are
            if not _are_paired(source, one, other, second.lineno):
                continue
            yield line_finding(
                source,
                second,
                "shuffled-apart",
                f"{one} and {other} are shuffled one after the other, each in an order of its own: "
                "samples get other samples' labels",
                f"line {first.lineno} shuffles {one}, this line {other}.",
                f"order = np.random.permutation(len({one})); {one}, {other} = {one}[order], "
                f"{other}[order]",
            )


def _split_order(source: Source) -> Iterator[Finding]:
    """``X_train, y_train, X_test, y_test = train_test_split(X, y)``."""
    for node, call in assigned_calls(source.nodes):
        targets = node.targets[0]
        if path_of(call.func).rpartition(".")[2] != "train_test_split" or len(call.args) != 2:
            continue
        if not isinstance(targets, ast.Tuple | ast.List) or len(targets.elts) != 4:
            continue
        names = [path_of(each) for each in targets.elts]
        if [_role(name) for name in names] != ["x", "y", "x", "y"]:
            continue
        right = ", ".join((names[0], names[2], names[1], names[3]))
        yield line_finding(
            source,
            node,
            "split-order",
            f"{names[1]} are no labels: train_test_split() gives both parts of the samples first, "
            "then both of the labels",
            f"of (X, y) it gives X_train, X_test, y_train, y_test: {names[1]} are samples of the "
            f"test, and {names[2]} labels of the training.",
            f"{right} = {source.text(call)}",
        )


def _role(name: str) -> str:
    """Are these samples ("x") or labels ("y"), by their name?"""
    words = {*name.lower().replace(".", "_").split("_")}
    return "y" if words & _LABELS else "x" if words & _SAMPLES else ""


def _bodies(source: Source) -> Iterator[list[ast.stmt]]:
    for node in source.nodes:
        if isinstance(body := getattr(node, "body", None), list):
            yield body


def _are_paired(source: Source, one: str, other: str, line: int) -> bool:
    """Are both given to one call after that line, each by itself (a data set, zip, a split)?"""
    for call in source.nodes:
        if not isinstance(call, ast.Call) or call.lineno <= line or len(call.args) < 2:
            continue
        named = [{path_of(each) for each in ast.walk(part)} for part in call.args]
        if any(one in each and other not in each for each in named) and any(
            other in each and one not in each for each in named
        ):
            return True
    return False
