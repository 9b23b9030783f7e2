"""Rules on calls that make the CPU wait for the GPU in every training step."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from trainfit.lint.reading.index import Index, method_of, path_of
from trainfit.lint.reading.project import Project
from trainfit.lint.reading.values import Value
from trainfit.lint.rules.making import finding
from trainfit.results.machine.doctor import Finding

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
    if call.func.id == "print" and any(_shows(project, each) for each in call.args):
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
            isinstance(each, ast.FormattedValue) and _is_gpu_tensor(project.value(each.value))
            for each in node.values
        )
    if isinstance(node, ast.Call) and method_of(node) == "format":
        return any(_is_gpu_tensor(project.value(each)) for each in node.args)
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
