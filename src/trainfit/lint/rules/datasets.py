"""Rules on data that is moved to the GPU too early: in a data set, or all of it before the loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from trainfit.lint.reading.index import Function, Index, keyword, method_of
from trainfit.lint.reading.project import Project
from trainfit.lint.rules.making import finding
from trainfit.results.machine.doctor import Finding

_PER_SAMPLE: Final = ("__getitem__", "__getitems__", "__iter__")
_LATER: Final = "move each batch in the training loop: batch = batch.to(device, non_blocking=True)"


def cuda_in_dataset(project: Project) -> Iterator[Finding]:
    """CUDA in what a DataLoader runs for each sample: __getitem__, a collate function."""
    for index, function, what in worker_functions(project):
        for call in _moves(project, index, function):
            yield finding(
                "cuda-in-dataset",
                index,
                call,
                f"{what} runs in the DataLoader's workers: with num_workers > 0 it fails with"
                ' "Cannot re-initialize CUDA in forked subprocess", and without workers every'
                " sample is copied to the GPU separately instead of one batch at a time.",
                f"{_without_move(index, call)}; {_LATER}",
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
        f"keep the data on the host ({_without_move(index, node)}); {_LATER}",
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
