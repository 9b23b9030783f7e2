"""Rules on DataLoaders: no workers, workers restarted each epoch, unpinned
memory."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from trainfit.lint.reading.index import (
    Index,
    Loop,
    argument,
    has_stars,
    is_literal,
    keyword,
    method_of,
)
from trainfit.lint.reading.project import Project
from trainfit.lint.reading.torch_names import words
from trainfit.lint.rules.making import finding
from trainfit.results.machine.doctor import Finding

#: Calls in `__getitem__` that cost nothing to speak of: workers would win nothing.
_CHEAP: Final = words(
    "len int float bool str tensor from_numpy as_tensor range isinstance full zeros ones item "
    "long copy get append tuple list dict abs min max"
)
_WORKERS: Final = 5  # DataLoader(dataset, batch_size, shuffle, sampler, batch_sampler, num_workers


def loader_defaults(project: Project) -> Iterator[Finding]:
    """A training loop's DataLoader without workers, or with workers that start every epoch."""
    for index, call in project.calls():
        if index.file.origin(call.func) != "torch.utils.data.DataLoader" or has_stars(call):
            continue
        loops = _iterations(project, call)
        if not any(loop in project.training_loops for _, loop in loops):
            continue
        workers = argument(call, _WORKERS, "num_workers")
        count = _count(workers)
        if count == 0 and _costs_work(project, call):
            yield _no_workers(index, call, workers)
        elif (
            count
            and keyword(call, "persistent_workers") is None
            and any(_is_again(project, other, loop) for other, loop in loops)
        ):
            yield _not_persistent(index, call, workers)


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
            "The copy comes from pageable memory: CUDA first copies it to a staging buffer"
            " and the call waits for that, so non_blocking=True has no effect. Only copies"
            " from pinned memory overlap with the GPU's work.",
            f"line {loader.lineno} of {where.file.source.name}: "
            + _with_keyword(where, loader, "pin_memory=True"),
        )


def _no_workers(index: Index, call: ast.Call, workers: ast.expr | None) -> Finding:
    source = index.file.source
    if workers is not None and keyword(call, "num_workers") is workers:
        rewrite = source.replaced(workers, "4")
    else:
        rewrite = _with_keyword(index, call, "num_workers=4, persistent_workers=True")
    return finding(
        "loader-defaults",
        index,
        call,
        "num_workers is 0: every sample is read and decoded in the training process, between"
        " steps, and the GPU waits for it. Workers prepare the next batches in parallel.",
        f"{rewrite} (choose the number by the usable cores: `trainfit doctor` lists them)",
    )


def _not_persistent(index: Index, call: ast.Call, workers: ast.expr | None) -> Finding:
    return finding(
        "loader-defaults",
        index,
        call,
        "The workers are shut down and restarted at every epoch: each time the processes are"
        " started, the data set is initialized and the GPU waits for the first batches.",
        _with_keyword(index, call, "persistent_workers=True"),
    )


def _with_keyword(index: Index, call: ast.Call, text: str) -> str:
    source = index.file.source
    if call.end_lineno != call.lineno:
        return f"add {text} to the arguments of DataLoader"
    whole = source.text(call)
    inner = whole[:-1].rstrip().rstrip(",")
    return source.replaced(call, f"{inner}{', ' if call.args or call.keywords else ''}{text})")


def _count(workers: ast.expr | None) -> int | None:
    """A number of workers that is certain."""
    if workers is None:
        return 0
    if isinstance(workers, ast.Constant) and type(workers.value) is int:
        return workers.value
    return None


def _iterations(project: Project, call: ast.Call) -> list[tuple[Index, Loop]]:
    """The loops that certainly go through this loader."""
    return [
        (index, node)
        for index in project.indexes
        for node in index.fors
        if call in _loaders(project, node.iter)
    ]


def _loaders(project: Project, node: ast.expr) -> frozenset[ast.Call]:
    """Through enumerate, zip and progress bars."""
    value = project.value(node)
    if value.loaders:
        return value.loaders
    inner = value.items[0] if value.kind == "list" and len(value.items) == 1 else value
    result: frozenset[ast.Call] = inner.loaders
    for each in inner.items:
        result |= each.loaders
    return result


def _is_again(project: Project, index: Index, loop: Loop) -> bool:
    """Is a loop run more than once: in another loop, or in a function called in one?"""
    if next(index.loops(loop), None) is not None:
        return True
    scope = index.scope(loop)
    if not isinstance(scope, ast.FunctionDef):
        return False
    return any(
        project.callee(other, site) is scope and next(other.loops(site), None) is not None
        for other, site in project.call_sites(scope)[0]
    )


def _costs_work(project: Project, call: ast.Call) -> bool:
    """Does a sample certainly cost more than picking it from memory?"""
    made = project.value(argument(call, 0, "dataset")).call
    if isinstance(made, ast.Call):
        origins = {
            o for i in project.indexes if made in i.parents for o in i.file.origins(made.func)
        }
        return any(
            origin.startswith("torchvision.datasets.") and not origin.endswith("FakeData")
            for origin in origins
        )
    if not isinstance(made, ast.ClassDef):
        return False
    sample = project.method(made, "__getitem__")
    return sample is not None and any(
        isinstance(node, ast.Call) and _name(node) not in _CHEAP for node in ast.walk(sample)
    )


def _name(call: ast.Call) -> str:
    func = call.func
    if isinstance(func, ast.Attribute):
        return func.attr
    return func.id if isinstance(func, ast.Name) else ""


def _is_unpinned(project: Project, call: ast.Call) -> bool:
    pin = keyword(call, "pin_memory")
    return not has_stars(call) and len(call.args) < 8 and (pin is None or is_literal(pin, False))
