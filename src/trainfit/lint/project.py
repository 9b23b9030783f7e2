"""A script and its own files as one project: definitions, call graph, training steps.

Whether autograd is enabled at a place is told here, too.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import Final, Literal

from trainfit.lint import values as script_torch
from trainfit.lint.imports import File
from trainfit.lint.index import (
    Function,
    Index,
    Loop,
    Scope,
    index_of,
    is_literal,
    method_of,
    path_of,
)
from trainfit.lint.values import UNKNOWN, Value

_OPTIMIZER: Final = re.compile(r"(^|_)(optim|optimi[sz]ers?|opt)(_|\d|$)", re.IGNORECASE)
#: A device of the script's: any GPU, or one by its number.
CUDA: Final = re.compile(r"cuda(:\d+)?")


@dataclasses.dataclass(eq=False)
class Project:
    """All that the rules ask; ``values`` is what the flow analysis found out about expressions."""

    files: list[File]
    is_whole: bool
    indexes: list[Index] = dataclasses.field(default_factory=list)
    values: dict[ast.AST, Value] = dataclasses.field(default_factory=dict)
    #: Files with parts that are nested too deeply to be followed.
    too_deep: set[str] = dataclasses.field(default_factory=set)
    _callees: dict[ast.Call, Function | None] = dataclasses.field(default_factory=dict)
    _file_of: dict[ast.AST, Index] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.indexes = [index_of(file) for file in self.files]
        for index in self.indexes:
            for node in (*index.functions, *index.classes):
                self._file_of[node] = index

    def value(self, node: ast.AST | None) -> Value:
        """What is certain about an expression."""
        return UNKNOWN if node is None else self.values.get(node, UNKNOWN)

    def index_of(self, node: Function | ast.ClassDef) -> Index:
        """The file that a function or class is defined in."""
        return self._file_of[node]

    def calls(self) -> Iterator[tuple[Index, ast.Call]]:
        """Every call of every file, in order."""
        for index in self.indexes:
            for call in index.calls:
                yield index, call

    @cached_property
    def _definitions(self) -> dict[tuple[int, str], list[Function | ast.ClassDef]]:
        definitions: dict[tuple[int, str], list[Function | ast.ClassDef]] = defaultdict(list)
        for number, index in enumerate(self.indexes):
            for node in (*index.functions, *index.classes):
                if not isinstance(index.parents.get(node), ast.ClassDef):
                    definitions[number, node.name].append(node)
        return definitions

    def definition(self, index: Index, node: ast.AST) -> Function | ast.ClassDef | None:
        """The own function or class that an expression names; None unless there is exactly one."""
        file, name = index.file.number, node.id if isinstance(node, ast.Name) else ""
        origin = index.file.origin(node)
        if origin.startswith("@"):
            number, _, name = origin[1:].partition(".")
            file = int(number)
            if name in self.files[file].imported:  # re-exported
                (again, *more) = self.files[file].imported[name]
                if more or not again.startswith("@"):
                    return None
                number, _, name = again[1:].partition(".")
                file = int(number)
        elif index.file.origins(node):
            return None
        found = self._definitions.get((file, name), [])
        return found[0] if len(found) == 1 else None

    def callee(self, index: Index, call: ast.Call) -> Function | None:
        """The own function or method that a call certainly runs."""
        if call not in self._callees:
            self._callees[call] = self._find_callee(index, call)
        return self._callees[call]

    def _find_callee(self, index: Index, call: ast.Call) -> Function | None:
        function = self.definition(index, call.func)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            return function
        path = path_of(call.func)
        if path.startswith("self.") and path.count(".") == 1:
            scope = index.scope(call)
            while isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
                owner = index.owner(scope)
                if owner is not None:
                    return self.method(owner, path[5:])
                scope = index.scope(scope)
        return None

    def method(self, owner: ast.ClassDef, name: str) -> Function | None:
        """A method defined in the class itself."""
        for node in owner.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return node
        return None

    def bases(self, owner: ast.ClassDef, depth: int = 0) -> Iterator[str]:
        """The foreign classes that a class derives from, through own ones."""
        index = self.index_of(owner)
        for base in owner.bases:
            target = base.value if isinstance(base, ast.Subscript) else base
            node = self.definition(index, target)
            if isinstance(node, ast.ClassDef) and node is not owner and depth < 16:
                yield from self.bases(node, depth + 1)
            else:
                yield from index.file.origins(target)

    def call_sites(self, function: Function) -> tuple[list[tuple[Index, ast.Call]], bool]:
        """Every call that may be one of this function, by its name; and are these all its uses?"""
        calls: list[tuple[Index, ast.Call]] = []
        complete = True
        for index in self.indexes:
            for read in index.reads.get(function.name, ()):
                parent = index.parents.get(read)
                if isinstance(parent, ast.Call) and parent.func is read:
                    calls.append((index, parent))
                elif not isinstance(parent, ast.Attribute):
                    complete = False
        return calls, complete

    @cached_property
    def manager(self) -> str:
        """The library that sets devices and precision in the script's place, or nothing."""
        for file in self.files:
            for name in sorted(file.foreign):
                if name in script_torch.MANAGERS:
                    return script_torch.MANAGERS[name]
            for origins in file.imported.values():
                for origin in origins:
                    if origin.startswith("transformers.") and "Train" in origin:
                        return "Transformers' Trainer"
        return ""

    @cached_property
    def hides_training(self) -> bool:
        """May a part that is not read (unread files, unknown packages) change how it trains?"""
        known = script_torch.PLAIN | sys.stdlib_module_names
        return (
            not self.is_whole
            or bool(self.too_deep)
            or any(
                file.foreign - known or any(not star.startswith("@") for star in file.stars)
                for file in self.files
            )
        )

    @cached_property
    def uses_cuda(self) -> bool:
        """Does the script name CUDA as a device anywhere?"""
        for index in self.indexes:
            if "cuda" in index.reads:
                return True
            for constant in index.constants:
                if isinstance(constant.value, str) and CUDA.fullmatch(constant.value):
                    return True
        return False

    @cached_property
    def words(self) -> frozenset[str]:
        """Every name, attribute, keyword and short text of all files, in lower case."""
        found: set[str] = set()
        for index in self.indexes:
            for node in index.parents:
                if isinstance(node, ast.Name):
                    found.add(node.id.lower())
                elif isinstance(node, ast.Attribute):
                    found.add(node.attr.lower())
                elif isinstance(node, ast.keyword | ast.arg):
                    found.add((node.arg or "").lower())
                elif isinstance(node, ast.alias):
                    found.update(node.name.lower().split("."))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value[:64].lower())
        return frozenset(found)

    def is_optimizer(self, node: ast.AST) -> bool:
        """Is an expression an optimizer, by its value or by its name?"""
        kind = self.value(node).kind
        if kind != "unknown":
            return kind == "optimizer"
        return bool(_OPTIMIZER.search(path_of(node).rpartition(".")[2]))

    def _is_step(self, call: ast.Call) -> bool:
        """Is it part of an optimizer's step: a backward pass, or the step itself?"""
        func = call.func
        if not isinstance(func, ast.Attribute):
            return False
        if func.attr == "backward":
            return True
        return func.attr == "step" and (
            self.is_optimizer(func.value)
            or any(self.is_optimizer(argument) for argument in call.args)
        )

    @cached_property
    def _steps(self) -> tuple[dict[Loop, Index], dict[Function, Index]]:
        """Loops that run one optimizer step a pass, and functions that are run once a step."""
        loops: dict[Loop, Index] = {}
        functions: dict[Function, Index] = {}
        queue: list[tuple[Index, ast.Call]] = [
            (index, call) for index, call in self.calls() if self._is_step(call)
        ]
        seen: set[Function] = set()
        while queue:
            index, call = queue.pop()
            loop = next(index.loops(call), None)
            if loop is not None:
                loops[loop] = index
                continue
            scope = index.scope(call)
            if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) or scope in seen:
                continue
            seen.add(scope)
            sites = [
                (other, site)
                for other, site in self.call_sites(scope)[0]
                if self.callee(other, site) is scope
            ]
            if sites:
                functions[scope] = index
            queue.extend(sites)
        called = {f: index for f, index in functions.items() if self._is_called_in(f, loops)}
        return loops, called

    def _is_called_in(self, function: Function, loops: dict[Loop, Index]) -> bool:
        """Is a function certainly run once a step: every call of it from a loop of steps?"""
        sites = [s for s in self.call_sites(function)[0] if self.callee(*s) is function]
        return bool(sites) and all(
            any(loop in loops for loop in index.loops(site)) for index, site in sites
        )

    @property
    def training_loops(self) -> dict[Loop, Index]:
        """The loops whose every pass is a step of training, and their files."""
        return self._steps[0]

    def step_region(self, index: Index, node: ast.AST) -> Loop | Function | None:
        """The loop (or function) that runs once a training step and that a node stands in."""
        loops, functions = self._steps
        for loop in index.loops(node):
            if loop in loops:
                return loop
        scope = index.scope(node)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) and scope in functions:
            return scope
        return None

    def backwards(self, scope: Scope) -> list[ast.Call]:
        """The backward passes in a function, and in the functions in it."""
        return [
            node
            for node in ast.walk(scope)
            if isinstance(node, ast.Call) and method_of(node) == "backward"
        ]


# ---
# Whether autograd is enabled at a place in a script: yes, no, or unknown.


Recording = Literal["on", "off", "maybe"]
#: Levels of callers that are examined; beyond, it is unknown.
_DEPTH: Final = 24


class GradientModes:
    """Answers for every place; functions are judged by their decorators and by all their calls."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._functions: dict[Function, Recording] = {}
        self._depth = 0
        self._switched = any(
            "torch.set_grad_enabled" in index.file.origins(call.func)
            and isinstance(index.parents.get(call), ast.Expr)
            for index, call in project.calls()
        )

    def at(self, index: Index, node: ast.AST) -> Recording:
        """Are gradients recorded where a node stands?"""
        here = self.inside(index, node)
        if here != "on":
            return here
        scope = index.scope(node)
        if scope is None:
            return "maybe"
        return "on" if isinstance(scope, ast.Module) else self.of_function(scope)

    def inside(self, index: Index, node: ast.AST) -> Recording:
        """Are gradients recorded by the `with` statements alone that a node stands in?"""
        if self._switched:
            return "maybe"
        for parent, child in index.ancestors(node):
            if isinstance(parent, ast.With | ast.AsyncWith) and child in parent.body:
                for item in parent.items:
                    recording = self._context(index, item.context_expr)
                    if recording is not None:
                        return recording
        return "on"

    def of_function(self, function: Function) -> Recording:
        """Are gradients recorded in a function: by its decorators and wherever it is called?"""
        if function in self._functions:
            return self._functions[function]
        self._functions[function] = "maybe"  # for a function that calls itself
        self._functions[function] = recording = self._of_function(function)
        return recording

    def _of_function(self, function: Function) -> Recording:
        index = self._project.index_of(function)
        for decorator in function.decorator_list:
            recording = self._context(index, decorator)
            if recording is not None:
                return recording
        sites, complete = self._project.call_sites(function)
        if not sites or not complete or self._depth > _DEPTH:
            return "maybe"
        self._depth += 1
        states = {self.at(other, site) for other, site in sites}
        self._depth -= 1
        return states.pop() if len(states) == 1 else "maybe"

    def _context(self, index: Index, node: ast.expr) -> Recording | None:
        """What a context manager or decorator does to gradients; None: nothing."""
        target = node.func if isinstance(node, ast.Call) else node
        origins = index.file.origins(target)
        if origins and origins <= script_torch.NO_GRAD:
            # inference_mode(False), no_grad() has no such argument
            off = isinstance(node, ast.Call) and node.args
            return "maybe" if off and not is_literal(node.args[0], True) else "off"  # type: ignore[attr-defined]
        if origins == {"torch.enable_grad"}:
            return "on"
        if origins == {"torch.set_grad_enabled"} and isinstance(node, ast.Call) and node.args:
            if is_literal(node.args[0], False):
                return "off"
            return "on" if is_literal(node.args[0], True) else "maybe"
        if origins and all(origin.startswith(script_torch.HARMLESS_CONTEXTS) for origin in origins):
            return None
        if path_of(target).rpartition(".")[2] in script_torch.HARMLESS_NAMES:
            return None
        return "maybe"
