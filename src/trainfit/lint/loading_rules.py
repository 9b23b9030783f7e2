"""Rules on data and portability: DataLoaders (workers, pinned memory), data that is on the GPU too
early, hard-coded CUDA, DataParallel.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from trainfit.findings.habits import DATA_PARALLEL, FLOAT32, ON_GPU_EARLY, UNPINNED, autocast
from trainfit.lint.imports import unparsed
from trainfit.lint.index import (
    PER_SAMPLE,
    Function,
    Index,
    Loop,
    finding,
    has_stars,
    inside,
    is_literal,
    keyword,
    method_of,
    named_devices,
    path_of,
)
from trainfit.lint.project import CUDA, Project
from trainfit.lint.step_rules import acts_on_world
from trainfit.lint.values import words
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
        for argument in call.args:
            if project.value(argument).place == "device":
                yield _early(index, argument)
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
            function = project.method(owner, name)
            if function is not None:
                yield index, function, f"{owner.name}.{name}"
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
            return any(isinstance(target, ast.Attribute) for target in parent.targets)
    return False


def _without_move(index: Index, node: ast.expr) -> str:
    source = index.file.source
    if isinstance(node, ast.Call) and method_of(node) in {"cuda", "to"}:
        assert isinstance(node.func, ast.Attribute)
        return source.replaced(node, source.text(node.func.value))
    return f"without the move to the GPU: {source.text(node)}"


#: An `if` about one of these may be what keeps CUDA calls off a machine without a GPU.
_GUARD: Final = re.compile(
    r"cuda|gpu|device|avail|distributed|ddp|rank|world|fp16|amp|half|cpu|mps|…", re.IGNORECASE
)
_CHOICE: Final = 'torch.device("cuda" if torch.cuda.is_available() else "cpu")'
_REASON: Final = (
    "The CUDA device is hard-coded, so the script fails on a machine"
    " without a CUDA GPU and cannot use another device."
)


def hard_coded_cuda(project: Project) -> Iterator[Finding]:
    """`.cuda()` and a literal "cuda" as a device, where nothing asks whether there is CUDA."""
    if project.manager or _wants_cuda(project):
        return
    for index in project.indexes:
        devices = named_devices(index)
        # All edits of a line at once: its rewrite is the whole line.
        edits: dict[int, list[tuple[int, int, str]]] = {}
        first: dict[int, ast.Call] = {}
        for call in index.calls:
            known = devices.get(index.scope(call)) or devices.get(index.file.source.tree)
            edit = _edit(index, call, known or "device")
            if edit is not None and not _is_guarded(project, index, call):
                number, start, end, new = edit
                edits.setdefault(number, []).append((start, end, new))
                first.setdefault(number, call)
        for number, call in first.items():
            line = index.file.source.edited(number, edits[number])
            known = devices.get(index.scope(call)) or devices.get(index.file.source.tree)
            hint = (
                "" if known or _CHOICE in line else f", with `device = {_CHOICE}` once at the top"
            )
            yield finding("hard-coded-cuda", index, call, _REASON, line + hint)


def data_parallel(project: Project) -> Iterator[Finding]:
    """nn.DataParallel, unless the script offers DistributedDataParallel as well."""
    if "distributeddataparallel" in project.words or "fully_shard" in project.words:
        return
    for index, call in project.calls():
        if index.file.origin(call.func) != "torch.nn.DataParallel" or not call.args:
            continue
        model = index.file.source.text(call.args[0])
        yield finding(
            "data-parallel",
            index,
            call,
            f"{DATA_PARALLEL.cause}. PyTorch's documentation recommends DistributedDataParallel,"
            " even on one machine.",
            f"torch.nn.parallel.DistributedDataParallel({model}, device_ids=[local_rank]),"
            " started by `torchrun --nproc_per_node=gpu`",
        )


def _wants_cuda(project: Project) -> bool:
    """Does the script check for CUDA and stop, or is it for several NVIDIA GPUs by design?"""
    if "nccl" in project.words:
        return True
    for index in project.indexes:
        for read in index.reads.get("is_available", ()):
            for parent, child in index.ancestors(read):
                if isinstance(parent, ast.Assert):
                    return True
                if isinstance(parent, ast.If) and child is parent.test and _stops(parent):
                    return True
    return False


def _stops(node: ast.If) -> bool:
    last = node.body[-1]
    if isinstance(last, ast.Raise | ast.Return):
        return True
    is_call = isinstance(last, ast.Expr) and isinstance(last.value, ast.Call)
    return is_call and path_of(last.value.func).rpartition(".")[2] in {"exit", "_exit", "error"}  # type: ignore[attr-defined]


def _edit(index: Index, call: ast.Call, device: str) -> tuple[int, int, int, str] | None:
    """(line, from, to, new text) where a call names a CUDA device; None where it does not."""
    source = index.file.source
    if method_of(call) == "cuda" and not index.file.origins(call.func):
        assert isinstance(call.func, ast.Attribute)
        if call.args and not isinstance(call.args[0], ast.Constant):
            return None  # the device is chosen elsewhere
        rest = [f"{k.arg}={source.text(k.value)}" for k in call.keywords if k.arg == "non_blocking"]
        number, _, end = source.span(call)
        base_line, _, start = source.span(call.func.value)
        return (
            number,
            start if base_line == number else 0,
            end,
            f".to({', '.join([device, *rest])})",
        )
    origin = index.file.origin(call.func)
    literal: ast.expr | None = None
    if origin == "torch.device":
        if not call.args or not _is_cuda(call.args[0]):
            return None
        return *source.span(call), _CHOICE
    if method_of(call) == "to" and not origin:
        literal = call.args[0] if call.args else keyword(call, "device")
    elif origin.startswith("torch.") and not origin.startswith(("torch.amp", "torch.autocast")):
        literal = keyword(call, "map_location" if origin == "torch.load" else "device")
    return (*source.span(literal), device) if literal is not None and _is_cuda(literal) else None


def _is_cuda(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and bool(CUDA.fullmatch(node.value))
    )


def _is_guarded(project: Project, index: Index, node: ast.AST, depth: int = 0) -> bool:
    """Does an `if`, a `try` or an early return before it, or before a caller, ask for a device?"""
    scope = index.scope(node)
    if scope is None or (isinstance(scope, ast.FunctionDef) and _is_guarded_name(scope.name)):
        return True
    for parent, child in index.ancestors(node):
        if isinstance(parent, ast.If | ast.IfExp | ast.While) and child is not parent.test:
            if _GUARD.search(unparsed(parent.test)):
                return True
        elif isinstance(parent, ast.Try | ast.TryStar | ast.BoolOp | ast.Match):
            return True
        body = getattr(parent, "body", None)
        if isinstance(body, list) and child in body:
            for before in body[: body.index(child)]:
                if isinstance(before, ast.If) and _asks_and_leaves(before):
                    return True
    if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) or depth > 3:
        return False
    sites, _ = project.call_sites(scope)
    return any(_is_guarded(project, other, site, depth + 1) for other, site in sites)


def _is_guarded_name(name: str) -> bool:
    return bool(re.search(r"cuda|gpu", name, re.IGNORECASE))


def _asks_and_leaves(node: ast.If) -> bool:
    return bool(_GUARD.search(unparsed(node.test))) and isinstance(
        node.body[-1], ast.Return | ast.Raise | ast.Continue
    )


# ---
# Rule on precision: no autocast where the GPU has units for it.


#: Any of these words in any file: precision is chosen somewhere, or float32 is needed.
_CHOSEN: Final = words(
    "autocast amp gradscaler half bfloat16 float16 bf16 fp16 mixed_precision use_amp "
    "precision float64 double complex64 complex128 cdouble cfloat apex set_default_dtype "
    "float8 fp8 transformer_engine lbfgs"
)

_WORD: Final = re.compile(r"[a-z0-9]+")


def no_autocast(project: Project) -> Iterator[Finding]:
    """A training loop on CUDA in a script that says nothing about precision anywhere."""
    if (
        project.manager
        or project.hides_training
        or not project.uses_cuda
        # The small networks of such scripts wait for launches, of which autocast makes more.
        or any(acts_on_world(project, index.file.source.tree) for index in project.indexes)
        or any(_CHOSEN & {word, *_WORD.findall(word)} for word in project.words)
    ):
        return
    for loop, index in sorted(
        project.training_loops.items(), key=lambda each: (each[1].file.number, each[0].lineno)
    ):
        call = _forward(project, index, loop)
        if call is None:
            continue
        line = index.file.source.line(call.lineno).strip()
        yield finding(
            "no-autocast",
            index,
            call,
            f"{FLOAT32.cause}. bfloat16 needs no GradScaler (GPUs before Ampere: float16 with"
            " one).",
            f"{autocast('bfloat16')} around the forward pass and the"
            f" loss, as in `{line}`; backward() stays outside{_refused(project)}",
        )
        return  # one is enough: it is about the script


def _refused(project: Project) -> str:
    """PyTorch raises where this loss is called under autocast."""
    if not {"bceloss", "binary_cross_entropy"} & project.words:
        return ""
    return ". BCELoss raises an error under autocast: use BCEWithLogitsLoss without a sigmoid"


def _forward(project: Project, index: Index, loop: Loop) -> ast.Call | None:
    """The first call of a network, with gradients, in a loop that has the backward pass too."""
    calls = [
        node
        for statement in loop.body
        for node in inside(statement)
        if isinstance(node, ast.Call)
        and project.value(node.func).kind == "module"
        and project.value(node).kind == "output"
        and project.value(node).graph
    ]
    return min(calls, key=lambda call: (call.lineno, call.col_offset), default=None)
