"""Abstract values of calls: PyTorch's constructors, tensors' methods, the user's own functions."""

from __future__ import annotations

import ast
import dataclasses
from collections import defaultdict
from typing import Final, Protocol

from trainfit.lint import values as torch_names
from trainfit.lint.index import Function, Index, argument, keyword, path_of
from trainfit.lint.project import Project
from trainfit.lint.values import NUMBER, UNKNOWN, Kind, Place, Value, element, join_all, shallow

_NUMBERS: Final = frozenset({"len", "int", "float", "bool", "round", "str", "repr", "range"})
#: Wrappers of an iterable that give its elements.
_PASSED_ON: Final = frozenset({"iter", "list", "tuple", "reversed", "sorted", "set", "tqdm"})


class Reader(Protocol):
    """What of the flow analysis is needed here."""

    records: bool

    def eval(self, node: ast.expr) -> Value:
        """The value of an expression."""


class CallValues:
    """Values of calls; and, over the rounds, what own functions are given and give back."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._given: dict[Function, dict[str, list[Value]]] = defaultdict(dict)
        self._returned: dict[Function, list[Value]] = defaultdict(list)
        self._parameters: dict[Function, dict[str, Value]] = {}
        self._returns: dict[Function, Value] = {}

    def begin_round(self) -> None:
        """Forget what the round before has noted; its conclusions stay."""
        self._given.clear()
        self._returned.clear()

    def end_round(self) -> bool:
        """Draw the conclusions of a round; are they others than those of the round before?"""
        before = self._returns, self._parameters
        self._returns = {f: shallow(join_all(v)) for f, v in self._returned.items()}
        self._parameters = {
            function: {name: shallow(join_all(values)) for name, values in given.items()}
            for function, given in self._given.items()
            if self.project.call_sites(function)[1]
        }
        return (self._returns, self._parameters) != before

    def parameters(self, function: Function) -> dict[str, Value]:
        """What a function's parameters are, by its calls and its annotations."""
        known = self._parameters.get(function, {})
        index = self.project.index_of(function)
        result = {}
        for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
            value = known.get(each.arg, UNKNOWN)
            if value.is_unknown and each.annotation is not None:
                value = _annotated(index.file.origin(each.annotation))
            result[each.arg] = value
        return result

    def note_return(self, function: Function, value: Value) -> None:
        """A function's return statement."""
        self._returned[function].append(value)

    def call(self, reader: Reader, index: Index, node: ast.Call) -> Value:
        """The value of a call; its arguments are read too."""
        base = reader.eval(node.func.value) if isinstance(node.func, ast.Attribute) else UNKNOWN
        given = [reader.eval(each) for each in node.args]
        named = {each.arg: reader.eval(each.value) for each in node.keywords}
        callee = self.project.callee(index, node)
        if callee is not None:
            self._note_given(index, callee, node, given, named)
            return self._returns.get(callee, UNKNOWN)
        origin = index.file.origin(node.func)
        if origin and not origin.startswith(("@", "?")):
            return self._foreign(reader, index, node, origin, given)
        definition = self.project.definition(index, node.func)
        if isinstance(definition, ast.ClassDef):
            return self._constructed(index, node, definition, given, named)
        if isinstance(node.func, ast.Name):
            function = reader.eval(node.func)
            if function.kind == "module":
                return self._applied(reader, function, [*given, *named.values()])
            return _builtin(node.func.id, given)
        return self._method(reader, index, node, base, [*given, *named.values()])

    def _note_given(
        self,
        index: Index,
        callee: Function,
        node: ast.Call,
        given: list[Value],
        named: dict[str | None, Value],
    ) -> None:
        spec = callee.args
        positional = [each.arg for each in (*spec.posonlyargs, *spec.args)]
        owner = self.project.index_of(callee).owner(callee)
        if owner is not None and positional:
            positional = positional[1:]  # self
        notes = self._given[callee]
        starred = any(isinstance(each, ast.Starred) for each in node.args) or None in named
        count = len(spec.defaults)
        defaults = {each.arg for each in (*spec.posonlyargs, *spec.args)[-count:] if count}
        for position, name in enumerate(positional):
            if starred:
                value = UNKNOWN
            elif position < len(given):
                value = given[position]
            elif name in named:
                value = named[name]
            else:
                value = UNKNOWN
                if name in defaults:
                    continue
            notes.setdefault(name, []).append(value)
        for only in spec.kwonlyargs:
            notes.setdefault(only.arg, []).append(named.get(only.arg, UNKNOWN))

    def _constructed(
        self,
        index: Index,
        node: ast.Call,
        owner: ast.ClassDef,
        given: list[Value],
        named: dict[str | None, Value],
    ) -> Value:
        start = self.project.method(owner, "__init__")
        if start is not None:
            self._note_given(index, start, node, given, named)
        bases = set(self.project.bases(owner))
        if any(_is_module_class(base) for base in bases):
            return Value("module", call=owner)
        if any(base.startswith("torch.utils.data.") for base in bases):
            return Value("dataset", call=owner)
        return UNKNOWN

    def _foreign(
        self, reader: Reader, index: Index, node: ast.Call, origin: str, given: list[Value]
    ) -> Value:
        """A call of a library's function by its dotted name."""
        if origin in torch_names.WRAPPERS:
            return given[0] if given and given[0].kind == "module" else Value("module")
        constructed = _constructor(origin, node)
        if constructed is not None:
            return constructed
        if origin == "torch.device":
            return Value("device")
        if origin.startswith("tqdm."):
            return given[0] if given else UNKNOWN
        if origin in torch_names.TENSOR_FUNCTIONS or origin.startswith("torch.nn.functional."):
            parts = [each for value in given for each in _flat(value)]
            tensors = [part for part in parts if part.is_tensors]
            place = self._place(index, keyword(node, "device"), reader)
            if not place and origin not in torch_names.FACTORIES:
                places = {tensor.place for tensor in tensors}
                place = "device" if "device" in places else (places or {""}).pop()
            graph = reader.records and origin not in torch_names.GRAPHLESS_FUNCTIONS
            return Value(
                "tensor", graph and any(tensor.graph for tensor in tensors), place or "host"
            )
        if origin.startswith("torch.nn.utils.clip_grad_norm"):
            return Value("tensor", place="device" if self.project.uses_cuda else "")
        return UNKNOWN

    def _place(self, index: Index, node: ast.expr | None, reader: Reader) -> Place:
        """The place where `device=` or the argument of `.to()` puts a tensor; empty if it does not
        say."""
        if node is None:
            return ""
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                return "host" if node.value == "cpu" else "device"
            return "device" if isinstance(node.value, int) and node.value is not True else ""
        value = reader.eval(node)
        if value.kind == "device":
            return "device"
        text = path_of(node).lower()
        return "device" if text.rpartition(".")[2].endswith(("device", "gpu")) else ""

    def _applied(self, reader: Reader, module: Value, given: list[Value]) -> Value:
        """What a module gives; PyTorch's losses give one tensor."""
        moved = self.project.uses_cuda or any(v.place == "device" for v in given)
        is_tensor = _is_loss(module) and any(v.graph for v in given)
        kind: Kind = "tensor" if is_tensor else "output"
        return Value(kind, graph=reader.records, place="device" if moved else "")

    def _method(
        self, reader: Reader, index: Index, node: ast.Call, base: Value, given: list[Value]
    ) -> Value:
        held = reader.eval(node.func)
        if held.kind == "module":  # self.model(x), models[0](x)
            return self._applied(reader, held, given)
        if not isinstance(node.func, ast.Attribute):
            return UNKNOWN
        name = node.func.attr
        if base.kind == "module":
            if name in torch_names.SELF_METHODS:
                return base
            return self._applied(reader, base, given) if name == "forward" else UNKNOWN
        if name in {"to", "cuda", "cpu"} and base.kind in {"unknown", "tensor", "output", "batch"}:
            return self._moved(reader, index, node, base, name)
        if base.is_tensors:
            return _tensor_method(reader, base, name)
        if base.kind in {"list", "tuple"}:
            return _list_method(base, name)
        return UNKNOWN

    def _moved(self, reader: Reader, index: Index, node: ast.Call, base: Value, name: str) -> Value:
        place: Place = "host" if name == "cpu" else "device"
        if name == "to":
            place = self._place(index, argument(node, 0, "device"), reader) or base.place
        kind = base.kind if base.kind != "batch" else "output"
        return Value(kind, base.graph and reader.records, place)


def _is_loss(module: Value) -> bool:
    """Is it one of torch.nn's losses? (No other constructor that is known ends so.)"""
    made = module.call
    name = path_of(made.func).rpartition(".")[2] if isinstance(made, ast.Call) else ""
    return name.endswith("Loss") and name != "AdaptiveLogSoftmaxWithLoss"


def _tensor_method(reader: Reader, base: Value, name: str) -> Value:
    if name == "item":
        return NUMBER
    if name in {"tolist", "size", "dim", "numel", "nelement"}:
        return NUMBER
    if name == "numpy":
        return Value("array", place="host")
    if name in {"values", "items", "keys"} and base.kind != "tensor":
        pair = Value("tuple", items=(Value("text"), base))
        kept = {"values": base, "items": pair, "keys": Value("text")}[name]
        return Value("list", items=(kept,))
    if name == "pin_memory":
        return dataclasses.replace(base, kind="output", loaders=frozenset())
    if name in torch_names.TENSOR_METHODS:
        graph = base.graph and reader.records and name not in torch_names.GRAPHLESS_METHODS
        return Value("tensor", graph, base.place)
    return dataclasses.replace(base, graph=False) if base.kind == "output" else UNKNOWN


def _list_method(base: Value, name: str) -> Value:
    if name == "items":
        return Value("list", items=(Value("tuple", items=(Value("text"), element(base))),))
    if name in {"values", "copy"}:
        return Value("list", items=base.items)
    return element(base) if name in {"pop", "get"} else UNKNOWN


def _builtin(name: str, given: list[Value]) -> Value:
    if name in _NUMBERS:
        return NUMBER
    if name in _PASSED_ON and given:
        return given[0]
    if name == "enumerate" and given:
        return Value("list", items=(Value("tuple", items=(NUMBER, element(given[0]))),))
    if name == "zip" and given:
        return Value("list", items=(Value("tuple", items=tuple(element(v) for v in given)),))
    if name == "next" and given:
        return element(given[0])
    if name == "sum" and given:
        value = element(given[0])
        return value if value.kind == "tensor" else UNKNOWN
    return UNKNOWN


def _constructor(origin: str, node: ast.Call) -> Value | None:
    module, _, last = origin.rpartition(".")
    is_class = last[:1].isupper()
    if origin == "torch.utils.data.DataLoader":
        return Value("loader", loaders=frozenset({node}))
    if origin == "torch.nn.Parameter":
        return Value("tensor", graph=False)
    if module == "torch.nn" and is_class:
        return Value("module", call=node)
    if module.startswith("torch.optim") and is_class:
        return Value("scheduler" if "lr_scheduler" in module else "optimizer")
    if last == "GradScaler" and module in {"torch.amp", "torch.cuda.amp"}:
        return Value("scaler")
    if module.startswith("torchvision.models") and not is_class and last != "get_model_weights":
        return Value("module", call=node)
    if origin in {"timm.create_model", "timm.models.create_model"}:
        return Value("module", call=node)
    if origin.startswith("transformers.") and last in {"from_pretrained", "from_config"}:
        return Value("module", call=node) if "Model" in module.rpartition(".")[2] else UNKNOWN
    if module.startswith(("torchvision.datasets", "torch.utils.data")) and is_class:
        return Value("dataset", call=node)
    return None


def _annotated(origin: str) -> Value:
    if _is_module_class(origin):
        return Value("module")
    if origin.startswith("torch.optim.") and "lr_scheduler" not in origin:
        return Value("optimizer")
    return Value("device") if origin == "torch.device" else UNKNOWN


def _is_module_class(origin: str) -> bool:
    module, _, last = origin.rpartition(".")
    return (module == "torch.nn" and last[:1].isupper() and last != "Parameter") or last in {
        "LightningModule",
        "PreTrainedModel",
    }


def _flat(value: Value) -> list[Value]:
    return [value, *value.items] if value.kind in {"list", "tuple"} else [value]
