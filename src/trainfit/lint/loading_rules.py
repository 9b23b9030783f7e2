"""Rules on data: DataLoaders (workers, pinned memory), and data that is on the GPU too early."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from trainfit.findings.habits import ON_GPU_EARLY, UNPINNED
from trainfit.lint.index import (
    PER_SAMPLE,
    Function,
    Index,
    finding,
    has_stars,
    is_literal,
    keyword,
    method_of,
)
from trainfit.lint.project import Project
from trainfit.results.findings import Finding


def non_blocking_without_pinning(project: Project) -> Iterator[Finding]:
    """`.to(device, non_blocking=True)` of a batch whose DataLoader does not pin its memory."""
    if project.manager:
        return
    for index, call in project.calls():
        if method_of(call) not in {"to", "cuda"}:
            continue
        if not is_literal(keyword(call, "non_blocking"), True):
            continue
        assert isinstance(call.func, ast.Attribute)
        batch = project.value(call.func.value)
        if not batch.loaders or not all(_is_unpinned(project, each) for each in batch.loaders):
            continue
        loader = min(batch.loaders, key=lambda each: each.lineno)
        where = next(i for i in project.indexes if loader in i.parents)
        yield finding(
            "non-blocking-without-pinning",
            index,
            call,
            f"{UNPINNED.cause}. Only copies from pinned memory overlap with the GPU's work.",
            f"line {loader.lineno} of {where.file.source.name}: "
            + _with_keyword(where, loader, "pin_memory=True"),
        )


def _with_keyword(index: Index, call: ast.Call, text: str) -> str:
    source = index.file.source
    if call.end_lineno != call.lineno:
        return f"add {text} to the arguments of DataLoader"
    whole = source.text(call)
    inner = whole[:-1].rstrip().rstrip(",")
    return source.replaced(call, f"{inner}{', ' if call.args or call.keywords else ''}{text})")


def _is_unpinned(project: Project, call: ast.Call) -> bool:
    pin = keyword(call, "pin_memory")
    return not has_stars(call) and len(call.args) < 8 and (pin is None or is_literal(pin, False))


# ---
# Rules on data that is moved to the GPU too early: in a data set, or all of it before the loop.


_PER_SAMPLE: Final = (*PER_SAMPLE, "__iter__")


def cuda_in_dataset(project: Project) -> Iterator[Finding]:
    """CUDA in what a DataLoader runs for each sample: __getitem__, a collate function."""
    for index, function, what in worker_functions(project):
        for call in _moves(project, index, function):
            yield finding(
                "cuda-in-dataset",
                index,
                call,
                f"{what} runs in the DataLoader's workers. {ON_GPU_EARLY.cause}, and without"
                " workers every sample is copied to the GPU separately instead of one batch at a"
                " time.",
                f"{_without_move(index, call)}; {ON_GPU_EARLY.action}",
            )


def data_on_gpu_before_loop(project: Project) -> Iterator[Finding]:
    """A data set made of tensors on the GPU."""
    for index, owner in _dataset_classes(project):
        start = project.method(owner, "__init__")
        for call in _moves(project, index, start) if start is not None else ():
            if _is_kept(index, call):
                yield _early(index, call)
    for index, call in project.calls():
        if index.file.origin(call.func) != "torch.utils.data.TensorDataset":
            continue
        if "dataloader" not in project.words:
            continue  # batches are cut from it some other way
        for each in call.args:
            if project.value(each).place == "device":
                yield _early(index, each)
                break


def _early(index: Index, node: ast.expr) -> Finding:
    return finding(
        "data-on-gpu-before-loop",
        index,
        node,
        "The whole data set stays in GPU memory during the run, memory that the model"
        " and its activations could use. A DataLoader over it indexes sample by sample with"
        " a kernel launch each, and can use neither workers nor pinned memory.",
        f"keep the data on the host ({_without_move(index, node)}); {ON_GPU_EARLY.action}",
    )


def worker_functions(project: Project) -> Iterator[tuple[Index, Function, str]]:
    """What a DataLoader runs for each sample or batch, and what it is in words."""
    for index, owner in _dataset_classes(project):
        for name in _PER_SAMPLE:
            found = project.method(owner, name)
            if found is not None:
                yield index, found, f"{owner.name}.{name}"
    for index, call in project.calls():
        if index.file.origin(call.func) == "torch.utils.data.DataLoader":
            collate = keyword(call, "collate_fn")
            made = project.definition(index, collate) if collate is not None else None
            if isinstance(made, ast.FunctionDef):
                yield project.index_of(made), made, f"{made.name}, the collate function,"


def _dataset_classes(project: Project) -> Iterator[tuple[Index, ast.ClassDef]]:
    for index in project.indexes:
        for owner in index.classes:
            if {"torch.utils.data.Dataset", "torch.utils.data.IterableDataset"} & set(
                project.bases(owner)
            ):
                yield index, owner


def _moves(project: Project, index: Index, function: Function) -> Iterator[ast.Call]:
    """What certainly goes to the GPU in a function, outside any `if`."""
    for call in index.calls:
        if index.scope(call) is not function or index.is_guarded(call, function):
            continue
        literal = call.args[0] if call.args else keyword(call, "device")
        named = (
            isinstance(literal, ast.Constant)
            and isinstance(literal.value, str)
            and literal.value.startswith("cuda")
        )
        if method_of(call) == "cuda" and not index.file.origins(call.func):
            yield call
        elif method_of(call) == "to" and (named or project.value(literal).kind == "device"):
            if project.value(call.func.value).kind != "module":  # type: ignore[attr-defined]
                yield call
        elif index.file.origin(call.func).startswith("torch."):
            device = keyword(call, "device")
            if isinstance(device, ast.Constant) and str(device.value).startswith("cuda"):
                yield call


def _is_kept(index: Index, call: ast.Call) -> bool:
    """Is the moved tensor stored in the data set?"""
    for parent, _ in index.ancestors(call):
        if isinstance(parent, ast.Assign):
            return any(isinstance(each, ast.Attribute) for each in parent.targets)
    return False


def _without_move(index: Index, node: ast.expr) -> str:
    source = index.file.source
    if isinstance(node, ast.Call) and method_of(node) in {"cuda", "to"}:
        assert isinstance(node.func, ast.Attribute)
        return source.replaced(node, source.text(node.func.value))
    return f"without the move to the GPU: {source.text(node)}"
