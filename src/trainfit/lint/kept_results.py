"""Results that lines keep, or read, otherwise than is meant: a list of all epochs' results, a list
of models that stay on the GPU, a copy to the host that is read before it is there."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from trainfit.lint.imports import Source
from trainfit.lint.index import (
    assigned_calls,
    assignments,
    keyword,
    line_finding,
    method_of,
    path_of,
)
from trainfit.results.findings import Finding

_LOOPS = (ast.For, ast.While, ast.AsyncFor)
#: What puts the elements of a list together, which are arrays or tensors then.
_JOINS = {"cat", "concat", "concatenate", "vstack", "hstack"}
_EMPTIES = {"clear", "pop", "popleft"}
#: Methods that give a model back.
_SAME_MODEL = {"eval", "train", "requires_grad_", "float", "half"}
#: What waits for a copy.
_WAITS = {"synchronize", "wait", "query", "wait_stream", "wait_event"}
#: What may wait for the GPU, of another tensor.
_READS = {"item", "tolist", "cpu", "numpy", "step"}
#: What uses a tensor without reading it.
_STORES = {"append", "add", "extend", "put", "record_stream"}


def kept_results(source: Source) -> Iterator[Finding]:
    """All of them in a file."""
    if not any("append(" in line or "non_blocking" in line for line in source.lines):
        return
    around = {child: node for node in source.nodes for child in ast.iter_child_nodes(node)}
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        if method_of(node) == "append" and len(node.args) == 1:
            yield from _of_all_epochs(source, node, around)
            yield from _models(source, node, around)
        elif _is_early_copy(node):
            yield from _read_early(source, node, around)


def _loops_around(node: ast.AST, around: dict[ast.AST, ast.AST]) -> list[ast.AST]:
    """Loops of the function that a node is in, the innermost first."""
    nodes: list[ast.AST] = []
    while node in around:
        node = around[node]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            break
        if isinstance(node, _LOOPS):
            nodes.append(node)
    return nodes


def _is_made_before(name: str, loop: ast.AST, source: Source) -> bool:
    """Is it a list that is made before a loop, and never made again or emptied?"""
    within = set(ast.walk(loop))
    made = assignments(source.nodes, name)
    if len(made) != 1 or made[0] in within or made[0].lineno > loop.lineno:  # type: ignore[attr-defined]
        return False
    value = made[0].value
    is_empty = isinstance(value, ast.List) and not value.elts
    emptied = any(
        (
            isinstance(node, ast.Call)
            and method_of(node) in _EMPTIES
            and path_of(node.func.value) == name  # type: ignore[attr-defined]
        )
        or (
            isinstance(node, ast.Delete)
            and any(path_of(getattr(target, "value", target)) == name for target in node.targets)
        )
        for node in source.nodes
    )
    return is_empty and not emptied


def _of_all_epochs(
    source: Source, call: ast.Call, around: dict[ast.AST, ast.AST]
) -> Iterator[Finding]:
    """``preds.append(…)`` of each batch, and ``torch.cat(preds)`` in each epoch."""
    assert isinstance(call.func, ast.Attribute)
    name, loops = path_of(call.func.value), _loops_around(call, around)
    if not name or len(loops) < 2 or not _is_made_before(name, loops[-1], source):
        return
    joined = [
        node
        for node in ast.walk(loops[-1])
        if isinstance(node, ast.Call)
        and method_of(node) in _JOINS
        and node.args
        and path_of(node.args[0]) == name
        and loops[0] not in _loops_around(node, around)
    ]
    if not joined:
        return
    yield line_finding(
        source,
        call,
        "kept-over-epochs",
        f"{name} is never emptied: each epoch adds its batches to those of all epochs before",
        f"memory grows with each epoch, and what line {joined[0].lineno} computes is of all epochs "
        "so far, results of the model as it was then among them.",
        f"{name} = [] at the start of each epoch, within the loop",
        "warning",
    )


def _models(source: Source, call: ast.Call, around: dict[ast.AST, ast.AST]) -> Iterator[Finding]:
    """``results.append((rate, model))`` of a model that each pass of a loop makes, and
    ``snapshots.append(copy.deepcopy(model))``."""
    assert isinstance(call.func, ast.Attribute)
    name, loops = path_of(call.func.value), _loops_around(call, around)
    if not name or not loops or not _is_made_before(name, loops[-1], source):
        return
    if any(isinstance(each, ast.If) for each in _between(call, loops[-1], around)):
        return
    calls = [node for node in ast.walk(loops[-1]) if isinstance(node, ast.Call)]
    trained = {
        path_of(each.func.value)
        for each in calls
        if isinstance(each.func, ast.Attribute) and each.func.attr == "parameters"
    }
    made = {
        path_of(target)
        for line, _ in assigned_calls(ast.walk(loops[-1]))
        for target in line.targets
    }
    back = {path_of(each.func.value) for each in calls if _is_to_cpu(each)}  # type: ignore[attr-defined]
    kept = call.args[0]
    for each in kept.elts if isinstance(kept, ast.Tuple | ast.List) else (kept,):
        element = each
        while isinstance(element, ast.Call) and method_of(element) in _SAME_MODEL:
            element = element.func.value  # type: ignore[attr-defined]
        model = path_of(element)
        is_new = model in trained & made
        if isinstance(element, ast.Call) and path_of(element.func).endswith("deepcopy"):
            given = element.args[0] if element.args else element
            is_state = isinstance(given, ast.Call) and method_of(given) == "state_dict"
            model = path_of(given.func.value) if is_state else path_of(given)  # type: ignore[attr-defined]
            is_new = is_state or (bool(model) and "model" in model.lower())
        if not is_new or model in back:
            continue
        yield line_finding(
            source,
            call,
            "models-kept",
            f"{name} keeps a model of each pass of the loop, where it is: memory of the GPU grows "
            "with each",
            "a model that is in a list is not freed, nor are its gradients, until the list is.",
            "keep the numbers, and of a model that is needed later its state on the CPU: "
            f"{{name: value.cpu() for name, value in {model}.state_dict().items()}}, or a file",
            "warning",
        )
        return


def _between(node: ast.AST, outer: ast.AST, around: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while node in around and node is not outer:
        node = around[node]
        yield node


def _is_to_cpu(call: ast.Call) -> bool:
    if method_of(call) == "cpu":
        return True
    given = call.args[0] if method_of(call) == "to" and call.args else None
    return isinstance(given, ast.Constant) and given.value == "cpu"


def _is_early_copy(call: ast.Call) -> bool:
    """``x.to("cpu", non_blocking=True)``."""
    waits = keyword(call, "non_blocking")
    return (
        method_of(call) == "to"
        and _is_to_cpu(call)
        and isinstance(waits, ast.Constant)
        and waits.value is True
    )


def _read_early(
    source: Source, call: ast.Call, around: dict[ast.AST, ast.AST]
) -> Iterator[Finding]:
    """A copy that nobody waits for, and a line after it in the same block that reads it."""
    user = around.get(call)
    if isinstance(user, ast.Assign) and len(user.targets) == 1:
        name = path_of(user.targets[0])
        reader = _first_reader(name, user, around) if name else None
    else:
        is_read = isinstance(user, ast.Attribute | ast.Compare | ast.BinOp | ast.Subscript)
        reader = call if is_read else None
    if reader is None:
        return
    yield line_finding(
        source,
        call,
        "copy-read-early",
        f"The copy to the CPU may not be there yet when line {reader.lineno} reads it: "
        "non_blocking=True does not wait for the GPU",
        "the numbers that are read are those that were in this memory before (zeros, an earlier "
        "batch); nothing fails.",
        "leave non_blocking=True out of copies to the CPU; or torch.cuda.synchronize() before they "
        "are read, once for many of them",
    )


def _first_reader(name: str, line: ast.stmt, around: dict[ast.AST, ast.AST]) -> ast.expr | None:
    """The first use of a variable in the statements after a line that reads its numbers; ``None``:
    something waits before, it is stored, or not used."""
    block = next(
        (
            each
            for field in ("body", "orelse", "finalbody")
            if line in (each := getattr(around.get(line), field, None) or [])
        ),
        [],
    )
    for statement in block[block.index(line) + 1 :] if block else ():
        nodes = list(ast.walk(statement))
        called = {method_of(node) for node in nodes if isinstance(node, ast.Call)}
        is_used = any(path_of(node) == name for node in nodes)
        if called & (_WAITS if is_used else _WAITS | _READS):
            return None
        for node in nodes:
            if isinstance(node, ast.Name | ast.Attribute) and path_of(node) == name:
                is_stored = (
                    isinstance(around.get(node), ast.Call)
                    and method_of(
                        around[node]  # type: ignore[arg-type]
                    )
                    in _STORES
                )
                kept = isinstance(around.get(node), ast.Tuple | ast.List | ast.Dict | ast.Return)
                return None if is_stored or kept else node
    return None
