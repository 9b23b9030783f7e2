"""Rules on the training step: graphs retained, waits for the GPU, settings with a cost.

Settings and habits that are meant, and have a cost or an effect that figures need to say:
deterministic algorithms, a script's own search for what fits.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from typing import Final

from trainfit.findings.habits import RESTARTED_ITERATOR
from trainfit.lint.imports import Source
from trainfit.lint.index import (
    Index,
    Loop,
    finding,
    inside,
    is_literal,
    keyword,
    line_finding,
    method_of,
    path_of,
)
from trainfit.lint.mistakes import mistakes
from trainfit.lint.project import Project
from trainfit.lint.values import Value
from trainfit.results.findings import Finding


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
        given = [source.text(argument) for argument in call.args]
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


def iterator_restarted(project: Project) -> Iterator[Finding]:
    """next(iter(loader)) in each step."""
    for index, call in project.calls():
        made = call.args[0] if _is_builtin(index, call, "next") and call.args else None
        if not isinstance(made, ast.Call) or not _is_builtin(index, made, "iter"):
            continue
        region = project.step_region(index, call)
        if region is None or len(made.args) != 1 or not path_of(made.args[0]):
            continue
        loader = path_of(made.args[0])
        if "load" not in loader.lower() and not project.value(made.args[0]).loaders:
            continue
        yield finding(
            "iterator-restarted",
            index,
            call,
            f"{RESTARTED_ITERATOR.cause}.",
            RESTARTED_ITERATOR.action.replace("loader", loader),
        )


def _is_builtin(index: Index, call: ast.Call, name: str) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == name and not index.file.origin(call)


def state_not_copied(project: Project) -> Iterator[Finding]:
    """best = model.state_dict(), or best = model where it is the best so far, in a loop that goes
    on training, used after it."""
    for loop, index in project.training_loops.items():
        outermost = [loop, *index.loops(loop)][-1]
        scope = index.scope(loop)
        if scope is None:
            continue
        for node in inside(outermost):
            if not isinstance(node, ast.Assign):
                continue
            kept = path_of(node.targets[0])
            if kept and _is_kept_model(project, index, outermost, node):
                if _reads_after(scope, outermost, kept):
                    yield _same_model(index, node, kept)
                continue
            if not _is_state(node.value):
                continue
            if kept and _is_used_after(scope, outermost, kept):
                text = index.file.source.text(node.value)
                found = finding(
                    "state-not-copied",
                    index,
                    node,
                    "state_dict() gives the parameters themselves, not a copy: later steps change "
                    "what is kept here, and at the end it is the last state, not the best.",
                    f"{kept} = copy.deepcopy({text})",
                )
                phrase = f"{kept} is the last state at the end, whichever was to be kept"
                yield dataclasses.replace(found, title=phrase)


#: Names of what is kept of a training.
_BEST: Final = re.compile(r"best", re.IGNORECASE)


def mistaken(project: Project) -> Iterator[Finding]:
    """optimizer.step without parentheses, as a statement, and the like."""
    for index in project.indexes:
        yield from mistakes(index.file.source)


def keeps_state(source: Source) -> bool:
    """Is there a line that :func:`state_not_copied` may be about?"""
    return any(
        isinstance(node, ast.Assign)
        and (_is_state(node.value) or _BEST.search(path_of(node.targets[0])) is not None)
        for node in source.nodes
    )


def _is_state(node: ast.expr) -> bool:
    is_call = isinstance(node, ast.Call) and method_of(node) == "state_dict"
    return is_call and not node.args and not node.keywords  # type: ignore[attr-defined]


def _is_kept_model(project: Project, index: Index, loop: Loop, node: ast.Assign) -> bool:
    """``best_model = model`` under a condition, of a model that the loop trains."""
    value = node.value
    if not isinstance(value, ast.Name) or _BEST.search(path_of(node.targets[0])) is None:
        return False
    if not isinstance(index.parents.get(node), ast.If):
        return False
    calls = [call for call in ast.walk(loop) if isinstance(call, ast.Call)]
    is_called = any(path_of(call.func) in (value.id, f"{value.id}.train") for call in calls)
    return is_called or project.value(value).kind == "module"


def _reads_after(scope: ast.AST, loop: Loop, kept: str) -> bool:
    after = (node for node in ast.walk(scope) if isinstance(node, ast.Name | ast.Attribute))
    end = loop.end_lineno or loop.lineno
    return any(
        node.lineno > end and isinstance(node.ctx, ast.Load) and path_of(node) == kept
        for node in after
    )


def _same_model(index: Index, node: ast.Assign, kept: str) -> Finding:
    text = index.file.source.text(node.value)
    found = finding(
        "state-not-copied",
        index,
        node,
        f"{kept} is another name of {text}, which later steps go on changing: at the end it is the "
        "last model, not the best.",
        f"{kept} = copy.deepcopy({text})",
    )
    phrase = f"{kept} is the last model at the end, whichever was to be kept"
    return dataclasses.replace(found, title=phrase)


def _is_used_after(scope: ast.AST, loop: Loop, kept: str) -> bool:
    """Is it loaded or saved by its name once the loop is over?"""
    for node in ast.walk(scope):
        if not isinstance(node, ast.Call) or node.lineno <= (loop.end_lineno or loop.lineno):
            continue
        if method_of(node) in {"load_state_dict", "save"} and any(
            path_of(argument) == kept for argument in node.args
        ):
            return True
    return False


# ---
# Rules on calls that make the CPU wait for the GPU in every training step.


_COPIES: Final = {"item", "tolist", "cpu", "numpy"}
_WAIT: Final = (
    "makes the CPU wait in every step until the GPU has finished all queued work; no"
    " new work is queued meanwhile, so the GPU idles afterwards."
)
_SELDOM: Final = "do it every n-th step only: `if step % 50 == 0:` before"


def sync_every_step(project: Project) -> Iterator[Finding]:
    """.item(), float(), .cpu(), print and the like of GPU tensors in each step of training."""
    if not project.uses_cuda:
        return
    for index in project.indexes:
        for call in index.calls:
            found = _what(project, index, call)
            if found is None:
                continue
            region = project.step_region(index, call)
            if region is None or index.is_guarded(call, region):
                continue
            if method_of(call) in _COPIES and acts_on_world(project, region):
                continue
            what, rewrite = found
            yield finding("sync-every-step", index, call, f"{what} {_WAIT}", rewrite)


def _what(project: Project, index: Index, call: ast.Call) -> tuple[str, str] | None:
    origin = index.file.origin(call.func)
    line = index.file.source.line(call.lineno).strip()
    if origin == "torch.cuda.synchronize":
        return (
            "torch.cuda.synchronize()",
            f"remove `{line}`; to time steps, record torch.cuda.Event(enable_timing=True) and"
            " read them every n-th step",
        )
    if origin == "torch.cuda.empty_cache":
        return (
            "torch.cuda.empty_cache() returns the allocator's memory to the driver,"
            " only to allocate it again at once: both are slow. It also",
            f"remove `{line}`: PyTorch reuses that memory itself (if fragmentation"
            " then uses too much: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)",
        )
    if origin:
        return None
    if method_of(call) in _COPIES and isinstance(call.func, ast.Attribute):
        if not _on_gpu(project.value(call.func.value)):
            return None
        kept = index.file.source.text(call.func.value)
        return f".{method_of(call)}()", _kept(kept, line)
    if not isinstance(call.func, ast.Name) or call.func.id in index.file.imported:
        return None
    if call.func.id in {"float", "int"} and len(call.args) == 1:
        if not _is_gpu_tensor(project.value(call.args[0])):
            return None
        return f"{call.func.id}() of a GPU tensor", _kept(
            index.file.source.text(call.args[0]), line
        )
    if call.func.id == "print" and any(_shows(project, argument) for argument in call.args):
        return "print() of a GPU tensor", f"{_SELDOM} `{line}`"
    return None


def _kept(tensor: str, line: str) -> str:
    base = tensor if tensor.endswith("detach()") else f"{tensor}.detach()"
    return (
        f"keep `{base}` on the GPU and read it every n-th step only: `if step % 50 == 0:` before"
        f" `{line}`"
    )


def _shows(project: Project, node: ast.expr) -> bool:
    if isinstance(node, ast.JoinedStr):
        return any(
            isinstance(value, ast.FormattedValue) and _is_gpu_tensor(project.value(value.value))
            for value in node.values
        )
    if isinstance(node, ast.Call) and method_of(node) == "format":
        return any(_is_gpu_tensor(project.value(argument)) for argument in node.args)
    return _is_gpu_tensor(project.value(node))


def _on_gpu(value: Value) -> bool:
    return value.is_tensors and value.place == "device"


def _is_gpu_tensor(value: Value) -> bool:
    """Surely a tensor: a network's output may be a dictionary that holds numbers too."""
    return value.kind == "tensor" and value.place == "device"


def acts_on_world(project: Project, region: ast.AST) -> bool:
    """Does the step need its results on the host: an environment or a robot that acts on them?"""
    for node in ast.walk(region):
        if isinstance(node, ast.Call) and method_of(node) in {"step", "act", "send_action"}:
            assert isinstance(node.func, ast.Attribute)
            last = path_of(node.func.value).rpartition(".")[2].lower()
            known = project.value(node.func.value).kind in {"optimizer", "scheduler", "scaler"}
            own = known or project.is_optimizer(node.func.value)
            own = own or any(word in last for word in ("sched", "scaler", "opt", "prof", "ema"))
            if node.args and not own:
                return True
    return False


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
    tries = (node for node in inside if isinstance(node, ast.Try))
    tried = (node.body[0] for node in tries if any(map(_of_memory, node.handlers)))
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
