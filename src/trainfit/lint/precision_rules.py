"""Rules on precision: no autocast where the GPU has units for it, and AMP's old names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from trainfit.findings.habits import FLOAT32, autocast
from trainfit.lint.index import Index, Loop, finding, inside
from trainfit.lint.project import Project
from trainfit.lint.source import unparsed
from trainfit.lint.step_rules import acts_on_world
from trainfit.lint.torch_names import words
from trainfit.results.findings import Finding

_OLD: Final = {
    "torch.cuda.amp.autocast": ("torch.amp.autocast", '"cuda"'),
    "torch.cuda.amp.GradScaler": ("torch.amp.GradScaler", '"cuda"'),
    "torch.cuda.amp.custom_fwd": ("torch.amp.custom_fwd", 'device_type="cuda"'),
    "torch.cuda.amp.custom_bwd": ("torch.amp.custom_bwd", 'device_type="cuda"'),
    "torch.cpu.amp.autocast": ("torch.amp.autocast", '"cpu"'),
    "torch.cpu.amp.GradScaler": ("torch.amp.GradScaler", '"cpu"'),
}
#: The arguments of torch.cuda.amp.autocast.
_OLD_ORDER: Final = ("enabled", "dtype", "cache_enabled")
#: Any of these words in any file: precision is chosen somewhere, or float32 is needed.
_CHOSEN: Final = words(
    "autocast amp gradscaler half bfloat16 float16 bf16 fp16 mixed_precision use_amp "
    "precision float64 double complex64 complex128 cdouble cfloat apex set_default_dtype "
    "float8 fp8 transformer_engine lbfgs"
)

#: A condition about what PyTorch is installed, as `_TORCH_GREATER_EQUAL_2_4`, too.
_VERSION: Final = re.compile(r"hasattr|version|torch\w*\d")
_WORD: Final = re.compile(r"[a-z0-9]+")


def deprecated_amp(project: Project) -> Iterator[Finding]:
    """torch.cuda.amp.*, which warns since PyTorch 2.4."""
    for index in project.indexes:
        called = {id(call.func): call for call in index.calls}
        for reads in index.reads.values():
            for read in reads:
                origin = index.file.origin(read)
                if origin not in _OLD or _is_version_guarded(index, read):
                    continue
                name, device = _OLD[origin]
                node = called.get(id(read), read)
                yield finding(
                    "deprecated-amp",
                    index,
                    node,
                    f"{origin} is deprecated since PyTorch 2.4 and warns (FutureWarning); torch.amp"
                    " has the same for any device type.",
                    _modern(index, node, name, device),
                )


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


def _is_version_guarded(index: Index, node: ast.AST) -> bool:
    """Under `try`, or under an `if` that asks for a version or an attribute?"""
    head = node
    while isinstance(head, ast.Attribute):
        head = head.value
    for parent, child in index.ancestors(node):
        if isinstance(parent, ast.Try | ast.TryStar):
            return True
        if isinstance(parent, ast.If | ast.IfExp) and child is not parent.test:
            text = unparsed(parent.test).lower()
            if _VERSION.search(text):
                return True
    return isinstance(head, ast.Name) and head.id in index.file.guarded


def _modern(index: Index, node: ast.expr, name: str, device: str) -> str:
    source = index.file.source
    note = "" if "torch" in index.file.imported else ", with `import torch`"
    if not isinstance(node, ast.Call):
        # A decorator without a call, or a class that is handed on.
        handed = f"functools.partial({name}, {device})"
        return source.replaced(node, f"{name}({device})" if "custom" in name else handed) + note
    given = [source.text(each) for each in node.args]
    if name.endswith("autocast"):
        # The new class begins with the device and has another order after it.
        given = [f"{key}={text}" for key, text in zip(_OLD_ORDER, given, strict=False)]
    given += [
        f"{each.arg}={source.text(each.value)}" if each.arg else f"**{source.text(each.value)}"
        for each in node.keywords
    ]
    return source.replaced(node, f"{name}({', '.join([device, *given])})") + note
