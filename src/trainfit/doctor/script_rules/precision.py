"""Precision: no autocast where the GPU has units for it, and AMP's old names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from trainfit.doctor.script_index import Index, Loop, inside, is_literal
from trainfit.doctor.script_project import Project
from trainfit.doctor.script_rules.making import finding
from trainfit.doctor.script_source import unparsed
from trainfit.doctor.script_torch import words
from trainfit.results.doctor import Finding

_OLD: Final = {
    "torch.cuda.amp.autocast": ("torch.amp.autocast", '"cuda"'),
    "torch.cuda.amp.GradScaler": ("torch.amp.GradScaler", '"cuda"'),
    "torch.cuda.amp.custom_fwd": ("torch.amp.custom_fwd", 'device_type="cuda"'),
    "torch.cuda.amp.custom_bwd": ("torch.amp.custom_bwd", 'device_type="cuda"'),
    "torch.cpu.amp.autocast": ("torch.amp.autocast", '"cpu"'),
    "torch.cpu.amp.GradScaler": ("torch.amp.GradScaler", '"cpu"'),
}
#: Any of these words in any file: precision is chosen somewhere, or float32 is needed.
_CHOSEN: Final = words(
    "autocast amp gradscaler half bfloat16 float16 bf16 fp16 mixed_precision use_amp "
    "precision float64 double complex64 complex128 cdouble cfloat apex set_default_dtype "
    "float8 fp8 transformer_engine lbfgs"
)

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
                    f"{origin} is deprecated since PyTorch 2.4 and warns at every use; torch.amp"
                    " has the same for any kind of device.",
                    _modern(index, node, name, device),
                )


def no_autocast(project: Project) -> Iterator[Finding]:
    """A training loop on CUDA in a script that says nothing about precision anywhere."""
    if (
        project.manager
        or project.hides_training
        or not project.uses_cuda
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
            "The forward pass runs in float32: matrix products and convolutions leave the Tensor"
            " cores' 16-bit rates unused and activations take twice the memory. bfloat16 needs no"
            " GradScaler (GPUs before Ampere: float16 with one).",
            'with torch.autocast("cuda", dtype=torch.bfloat16): around the forward pass and the'
            f" loss, as in `{line}`; backward() stays outside",
        )
        return  # one is enough: it is about the script


def _forward(project: Project, index: Index, loop: Loop) -> ast.Call | None:
    """The first call of a network in a loop that has its backward pass in it too."""
    calls = [
        node
        for statement in loop.body
        for node in inside(statement)
        if isinstance(node, ast.Call)
        and project.value(node.func).kind == "module"
        and project.value(node).kind == "output"
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
            if "hasattr" in text or "version" in text:
                return True
    return isinstance(head, ast.Name) and head.id in index.file.guarded


def _modern(index: Index, node: ast.expr, name: str, device: str) -> str:
    source = index.file.source
    if not isinstance(node, ast.Call):
        # A decorator without a call, or a function that is handed on.
        return source.replaced(node, f"{name}({device})" if "custom" in name else name)
    given = [
        f"*{source.text(a.value)}" if isinstance(a, ast.Starred) else source.text(a)
        for a in node.args
    ]
    if name.endswith("autocast") and given:
        # The old function's first argument was `enabled`, the new one's is the device.
        if is_literal(node.args[0], True):
            given = given[1:]
        else:
            given[0] = f"enabled={given[0]}"
    elif name.endswith("GradScaler") and given:
        given[0] = f"init_scale={given[0]}"
    named = [
        f"{k.arg}={source.text(k.value)}" if k.arg else f"**{source.text(k.value)}"
        for k in node.keywords
    ]
    return source.replaced(node, f"{name}({', '.join([device, *given, *named])})")
