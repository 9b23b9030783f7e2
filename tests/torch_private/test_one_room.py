"""No module but those of ``torch_private`` uses a private name of PyTorch."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Final

import pytest
import torch

SOURCE: Final = Path(__file__).resolve().parents[2] / "src" / "trainfit"
ROOM: Final = SOURCE / "torch_private"
#: Runs by its path in an interpreter that may have no trainfit, and does without what is missing.
PROBE: Final = SOURCE / "hardware" / "probes" / "torch_devices.py"
MODULES: Final = [
    path for path in sorted(SOURCE.rglob("*.py")) if ROOM not in path.parents and path != PROBE
]
#: Where PyTorch's classes stand whose instances we are given.
THEIRS: Final = (
    "_ops.py", "_tensor.py", "_library/custom_ops.py", "amp", "autograd", "cuda", "nn/modules",
    "nn/parallel", "nn/parameter.py", "optim", "overrides.py", "storage.py", "utils/data",
    "utils/_python_dispatch.py", "serialization.py",
)  # fmt: skip
#: Names that a class of ours has as well: what it is read from is ours.
OURS: Final = {
    "_meta": "a simulated tensor",
    "_spec": "a simulated tensor",
    "_life": "a simulated tensor",
    "_dtype": "what watches or changes a run",
    "_own": "what watches or changes a run",
    "_sizes": "what watches a DataLoader",
    "_replaced": "what watches a DataLoader",
    "_find": "what watches a DataLoader",
    "_meet": "the interventions' scene",
    "_offset": "the generator of the simulated device, which derives from PyTorch's",
    "_T": "a type variable",
    "_K": "a type variable",
    "_F": "a type variable",
    "_s": "the end of a field's name: seconds",
    "_bytes": "the end of a field's name",
    "_place": "what an intervention hides from a module",
    "_fields": "a named tuple's",
    "_C": "torchvision's extension, by the name of its file",
    "_stack": "a recorder's own slot",
    "_counts": "a recorder's own slot",
}
#: Methods of PatchSet and functions of Python whose second argument is an attribute's name.
BY_NAME: Final = frozenset({"getattr", "setattr", "hasattr", "delattr", "set", "get", "place"})


#: What stands for ``self`` in a function within a method.
SELF: Final = frozenset({"self", "cls", "super"})
#: Definitions of modules and classes, and what objects set on themselves.
_DEFINED: Final = re.compile(
    r"\bself\.(_\w+)|^(?:    )?def (_\w+)|^(?:    )?(_\w+) *[:=]", re.MULTILINE
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def names_of_torch() -> frozenset[str]:
    """Private attributes that PyTorch's own classes define or set."""
    root = Path(torch.__file__).parent
    found: set[str] = set(dir(torch.Tensor)) | set(dir(torch.UntypedStorage))
    for place in THEIRS:
        path = root / place
        for file in [path] if path.suffix else path.rglob("*.py"):
            text = file.read_text()
            for groups in _DEFINED.findall(text):
                found |= set(groups)
    return frozenset(name for name in found if is_private(name))


def path_of(node: ast.expr) -> str:
    """``a.b.c`` as it is written; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


class Uses(ast.NodeVisitor):
    """Private names of PyTorch in one module, as ``line: what``."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[str] = []
        #: By local name: the module or object of PyTorch that it stands for.
        self._torch: dict[str, str] = {}
        self._own: list[set[str]] = []
        self.visit(tree)

    def _add(self, node: ast.AST, what: str) -> None:
        self.found.append(f"{getattr(node, 'lineno', 0)}: {what}")

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == "torch":
                self._imported(node, alias.name, alias.asname or "torch")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                self._imported(node, f"{node.module}.{alias.name}", alias.asname or alias.name)

    def _imported(self, node: ast.AST, path: str, name: str) -> None:
        self._torch[name] = path
        if any(map(is_private, path.split("."))):
            self._add(node, path)

    def visit_Assign(self, node: ast.Assign) -> None:
        root = path_of(node.value).split(".")[0]
        if root in self._torch:  # aten = torch.ops.aten
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self._torch[target.id] = path_of(node.value)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._own.append(_own_names(node))
        self.generic_visit(node)
        self._own.pop()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        root = path_of(node).split(".")[0]
        if root in self._torch and any(map(is_private, path_of(node).split(".")[1:])):
            self._add(node, path_of(node))
            return
        if is_private(node.attr) and not self._is_ours(node):
            self._add(node, ast.unparse(node))
        if node.attr == "__func__" and self._torch.keys() & _names_in(node):
            self._add(node, ast.unparse(node))
        self.generic_visit(node)

    def _is_ours(self, node: ast.Attribute) -> bool:
        if node.attr in OURS or node.attr not in names_of_torch():
            return True
        value = node.value.func if isinstance(node.value, ast.Call) else node.value
        is_self = isinstance(value, ast.Name) and value.id in SELF
        return is_self and any(node.attr in names for names in self._own)

    def visit_Call(self, node: ast.Call) -> None:
        called = path_of(node.func).rpartition(".")[2]
        if called in BY_NAME:
            for each in node.args[:2]:
                self._named(each)
        self.generic_visit(node)

    def _named(self, node: ast.expr) -> None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
            if is_private(name) and name in names_of_torch() and name not in OURS:
                self._add(node, repr(name))

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        text = node.value
        if isinstance(text, str) and _PATH.search(_TOLD.sub("", text)):
            self._add(node, repr(text))


#: What PyTorch's documentation tells users to call, and so do we.
_TOLD: Final = re.compile(r"torch\.cuda\.memory\._(?:record_memory_history|dump_snapshot)\b")
#: A module or name of PyTorch's that is private, within a text.
_PATH: Final = re.compile(r"\btorch(?:\.\w+)*\._[A-Za-z]")


def _names_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _own_names(node: ast.ClassDef) -> set[str]:
    """What a class of ours defines, sets on itself or declares."""
    names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            names.add(each.attr)
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            names.add(each.target.id)
    return names


def test_private_names_of_pytorch_stand_in_the_room_only() -> None:
    texts = {path: path.read_text() for path in MODULES}
    suspect = {path: text for path, text in texts.items() if "torch" in text or _names(text)}
    uses = {path: Uses(ast.parse(text)).found for path, text in suspect.items()}
    assert {str(path.relative_to(SOURCE)): found for path, found in uses.items() if found} == {}


def _names(text: str) -> set[str]:
    return set(re.findall(r"\b_[A-Za-z]\w*", text)) & names_of_torch() - OURS.keys()


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch._C._cuda_init()",
        "import torch._dynamo",
        "from torch.utils._pytree import tree_map",
        "from torch.nn.modules.conv import _ConvNd",
        "import torch\naten = torch.ops.aten\naten._to_copy.default",
        "def f(tensor): return tensor._version",
        "def f(loader): return getattr(loader, '_iterator', None)",
        "def f(patches, torch, g): patches.set(torch.autograd, '_make_grads', g)",
        "import importlib\nimportlib.import_module('torch._dynamo')",
        "class A:\n    def f(self, module): return module._parameters",
        "import torch\nvars(torch.autograd.Function)['apply'].__func__",
    ],
)
def test_uses_are_seen(text: str) -> None:
    assert len(Uses(ast.parse(text)).found) == 1
