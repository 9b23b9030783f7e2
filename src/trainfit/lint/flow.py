"""Follows values through a script's statements: an abstract interpretation, nothing is run.

Every function is read with what all its visible calls give it; two rounds, so that what a function
returns is known where it is called. Branches are joined: only what holds in all of them is kept.
"""

from __future__ import annotations

import ast
import dataclasses
from collections import defaultdict
from typing import Final, TypeAlias

from trainfit.lint.calls import CallValues
from trainfit.lint.index import FUNCTIONS, Function, Index, method_of, path_of
from trainfit.lint.project import GradientModes, Project
from trainfit.lint.values import (
    FIGURES,
    NUMBER,
    UNKNOWN,
    Value,
    element,
    join_all,
    joined,
    shallow,
    unpacked,
)

# ---
# The values of a body's expressions, and the names that they are bound to.


Env: TypeAlias = dict[str, Value]
#: (function or class, path) → methods called on it without arguments.
Uses: TypeAlias = dict[tuple[ast.AST | None, str], set[str]]
#: What a name's uses say it is, where nothing else does: the methods called on it.
_MODULE_USES: Final = frozenset({"eval", "parameters", "named_parameters", "named_modules"})


@dataclasses.dataclass
class KnownNames:
    """What is known of a script's functions, classes and modules beyond the body that is read."""

    project: Project
    gradients: GradientModes
    calls: CallValues
    globals: list[Env]
    uses: list[Uses]
    attributes: dict[ast.ClassDef, dict[str, list[Value]]]
    """What this round has seen bound to ``self``'s attributes."""
    classes: dict[ast.ClassDef, Env]
    """What the round before has found of them."""

    @classmethod
    def of(cls, project: Project) -> KnownNames:
        """Nothing yet."""
        uses = [_uses(index) for index in project.indexes]
        globals_: list[Env] = [{} for _ in project.files]
        return cls(
            project,
            GradientModes(project),
            CallValues(project),
            globals_,
            uses,
            defaultdict(dict),
            {},
        )


def _uses(index: Index) -> Uses:
    """(function or class, path) → methods called on it without arguments."""
    uses: Uses = defaultdict(set)
    for call in index.calls:
        if not isinstance(call.func, ast.Attribute) or call.args:
            continue
        path = path_of(call.func.value)
        if path and not (call.keywords and call.func.attr != "backward"):
            uses[index.scope(call), path].add(call.func.attr)
    return uses


class Expressions:
    """The expressions of one function (or module), with the environment that they change."""

    def __init__(
        self, known: KnownNames, index: Index, env: Env, function: Function | None
    ) -> None:
        self.known, self.index, self.env, self.function = known, index, env, function
        self.values = known.project.values
        self.scope: ast.AST = function or index.file.source.tree
        self.owner = self._owner(function)
        recording = "on" if function is None else known.gradients.of_function(function)
        # A function that no call shows records unless something switches it off.
        self.records = recording != "off"

    def _owner(self, function: Function | None) -> ast.ClassDef | None:
        while function is not None:
            owner = self.index.owner(function)
            if owner is not None:
                return owner
            outer = self.index.scope(function)
            function = outer if isinstance(outer, FUNCTIONS) else None
        return None

    def set(self, path: str, value: Value) -> None:
        value = shallow(value)
        self.env[path] = value
        if path.startswith("self.") and self.owner is not None:
            self.known.attributes[self.owner].setdefault(path, []).append(value)

    def bind(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            if any(isinstance(node, ast.Starred) for node in target.elts):
                parts = [element(value)] * len(target.elts)
            else:
                parts = unpacked(value, len(target.elts))
            for each, part in zip(target.elts, parts, strict=True):
                self.bind(each, part)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, Value("list", items=(value,)))
        elif path := path_of(target):
            self.values[target] = value
            self.set(path, value)
        elif isinstance(target, ast.Subscript):
            self.eval(target.slice)
            base = path_of(target.value)
            held = self.eval(target.value)
            if base and held.kind in {"list", "tuple"}:
                self.set(base, Value("list", items=(joined(element(held), value),)))

    # Expressions

    def eval(self, node: ast.expr) -> Value:
        """The value of an expression, noted for the rules."""
        value = self._eval(node)
        self.values[node] = value
        return value

    def _eval(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                return Value("text")
            return NUMBER if isinstance(node.value, bool | int | float) else UNKNOWN
        if isinstance(node, ast.Name):
            return self.lookup(node.id)
        if isinstance(node, ast.Attribute):
            return self.attribute(node)
        if isinstance(node, ast.Call):
            return self.known.calls.call(self, self.index, node)
        if isinstance(node, ast.BinOp):
            return self.binary(node)
        if isinstance(node, ast.Compare):
            values = [self.eval(comparator) for comparator in (node.left, *node.comparators)]
            plain = any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops)
            tensor = next((v for v in values if v.kind == "tensor"), None)
            return NUMBER if plain or tensor is None else dataclasses.replace(tensor, graph=False)
        if isinstance(node, ast.Tuple | ast.List):
            items = tuple(self.eval(each) for each in node.elts)
            return Value("tuple" if isinstance(node, ast.Tuple) else "list", items=items)
        if isinstance(node, ast.Dict):
            parts = [self.eval(each) for each in (*filter(None, node.keys), *node.values)]
            return Value("list", items=tuple(parts[len(parts) - len(node.values) :]))
        return self._eval_rest(node)

    def _eval_rest(self, node: ast.expr) -> Value:
        if isinstance(node, ast.UnaryOp):
            value = self.eval(node.operand)
            return NUMBER if isinstance(node.op, ast.Not) else value
        if isinstance(node, ast.BoolOp):
            return join_all([self.eval(each) for each in node.values])
        if isinstance(node, ast.IfExp):
            self.eval(node.test)
            return joined(self.eval(node.body), self.eval(node.orelse))
        if isinstance(node, ast.Subscript):
            value = self.eval(node.value)
            self.eval(node.slice)
            return element(value)
        if isinstance(node, ast.NamedExpr):
            value = self.eval(node.value)
            self.bind(node.target, value)
            return value
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            return self.comprehension(node)
        if isinstance(node, ast.Await | ast.Starred):
            return self.eval(node.value)
        if isinstance(node, ast.Lambda):
            return Value("function")
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.eval(child)
        return Value("text") if isinstance(node, ast.JoinedStr) else UNKNOWN

    def comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> Value:
        outer, self.env = self.env, dict(self.env)
        for generator in node.generators:
            self.bind(generator.target, element(self.eval(generator.iter)))
            for test in generator.ifs:
                self.eval(test)
        if isinstance(node, ast.DictComp):
            self.eval(node.key)
            value = self.eval(node.value)
        else:
            value = self.eval(node.elt)
        self.env = outer
        return Value("list", items=(value,))

    def binary(self, node: ast.BinOp) -> Value:
        """A chain of operators, whose left side the tree nests."""
        chain: list[ast.BinOp] = []
        left: ast.expr = node
        while isinstance(left, ast.BinOp):
            chain.append(left)
            left = left.left
        value = self.eval(left)
        for each in reversed(chain):
            value = self.arithmetic(value, self.eval(each.right))
            self.values[each] = value
        return value

    def arithmetic(self, one: Value, other: Value) -> Value:
        tensors = [v for v in (one, other) if v.kind == "tensor"]
        if tensors:
            on_device = any(v.place == "device" for v in tensors)
            return Value(
                "tensor",
                graph=self.records and any(v.graph for v in tensors),
                place="device" if on_device else tensors[0].place,
            )
        if one.kind == other.kind == "number":
            return NUMBER
        return Value("list", items=one.items + other.items) if _lists(one, other) else UNKNOWN

    def attribute(self, node: ast.Attribute) -> Value:
        base = self.eval(node.value)
        path = path_of(node)
        value = self.lookup(path) if path else UNKNOWN
        if not value.is_unknown:
            return value
        if base.is_tensors:
            if node.attr in FIGURES:
                return NUMBER
            graph = base.graph and node.attr not in {"data", "grad"}
            if node.attr in {"data", "grad", "T", "mT"}:
                return dataclasses.replace(base, graph=graph)
            return base if base.kind == "output" else UNKNOWN
        return UNKNOWN

    def lookup(self, path: str) -> Value:
        found = self.env.get(path, UNKNOWN)
        if found.is_unknown and self.owner is not None and path.startswith("self."):
            found = self.known.classes.get(self.owner, {}).get(path, UNKNOWN)
        if found.is_unknown and path not in self.env and "." not in path:
            found = self.known.globals[self.index.file.number].get(path, UNKNOWN)
        if found.is_unknown:
            found = self.imported(path)
        return self.by_use(path) if found.is_unknown else found

    def imported(self, path: str) -> Value:
        """A value that another own file defines."""
        if path in self.env or "." in path:
            return UNKNOWN
        origins = self.index.file.imported.get(path, ())
        origin = next(iter(origins)) if len(origins) == 1 else ""
        number, _, name = origin[1:].partition(".")
        if not origin.startswith("@") or not name or "." in name:
            return UNKNOWN
        return self.known.globals[int(number)].get(name, UNKNOWN)

    def by_use(self, path: str) -> Value:
        """What an unknown name must be, for the methods that are called on it."""
        uses = self.known.uses[self.index.file.number].get((self.scope, path), ())
        if not uses:
            return UNKNOWN
        if _MODULE_USES & set(uses):
            return Value("module")
        if "backward" in uses:
            place = "device" if self.known.project.uses_cuda else ""
            return Value("tensor", graph=self.records, place=place)  # type: ignore[arg-type]
        return UNKNOWN


def _lists(one: Value, other: Value) -> bool:
    return one.kind == other.kind == "list"


# ---
# Follows values through a script's statements: an abstract interpretation, nothing is run.


_ROUNDS: Final = 3


def follow(project: Project) -> None:
    """Fill ``project.values``."""
    flow = _Flow(project)
    for number in range(_ROUNDS):
        if not flow.round() and number:
            return  # nothing new that another round could use


class _Flow:
    def __init__(self, project: Project) -> None:
        self.project = project
        self.known = KnownNames.of(project)
        self.calls = self.known.calls
        self.closures: dict[Function, Env] = {}

    def round(self) -> bool:
        """All statements of all files once; is anything new known of functions and classes?"""
        self.calls.begin_round()
        self.known.attributes.clear()
        for number, index in enumerate(self.project.indexes):
            body = _Body(self.known, index, self.known.globals[number], None)
            self._run(body, index, index.file.source.tree.body)
            for function in index.functions:
                self._function(index, function)
        before = self.known.classes
        self.known.classes = {
            owner: {path: join_all(values) for path, values in attribute.items()}
            for owner, attribute in self.known.attributes.items()
        }
        return self.calls.end_round() or self.known.classes != before

    def _run(self, body: _Body, index: Index, statements: list[ast.stmt]) -> None:
        try:
            body.run(statements)
        except RecursionError:
            self.project.too_deep.add(index.file.source.name)

    def _function(self, index: Index, function: Function) -> None:
        outer = index.scope(function)
        env: Env = {}
        if isinstance(outer, FUNCTIONS):
            env.update(self.closures.get(outer, {}))
        env.update(self.calls.parameters(function))
        body = _Body(self.known, index, env, function)
        self._run(body, index, function.body)
        self.closures[function] = {k: v for k, v in env.items() if not v.is_unknown}


class _Body(Expressions):
    """One function's (or module's) statements."""

    def __init__(
        self, known: KnownNames, index: Index, env: Env, function: Function | None
    ) -> None:
        super().__init__(known, index, env, function)
        self.nested = 0

    def run(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            value = self.eval(node.value)
            for target in node.targets:
                self.bind(target, value)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.bind(node.target, self.eval(node.value))
        elif isinstance(node, ast.AugAssign):
            self.bind(node.target, self.arithmetic(self.eval(node.target), self.eval(node.value)))
        elif isinstance(node, ast.Return):
            value = UNKNOWN if node.value is None else self.eval(node.value)
            if self.function is not None:
                self.known.calls.note_return(self.function, value)
        elif not self.compound(node):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.eval(child)
            self.note_backward(node)

    def note_backward(self, node: ast.stmt) -> None:
        """What a network gave may be a structure; what has a backward() is a tensor."""
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call) or method_of(call) != "backward":
            return
        assert isinstance(call.func, ast.Attribute)
        path = path_of(call.func.value)
        if path and (value := self.lookup(path)).kind == "output":
            self.set(path, dataclasses.replace(value, kind="tensor"))

    def compound(self, node: ast.stmt) -> bool:
        """A statement with statements in it."""
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            self.loop(node)
        elif isinstance(node, ast.If):
            self.branches(node)
        elif isinstance(node, ast.With | ast.AsyncWith):
            self.with_(node)
        elif isinstance(node, ast.Try | ast.TryStar):
            self.alternatives([[*node.body, *node.orelse], *(h.body for h in node.handlers)])
            self.run(node.finalbody)
        elif isinstance(node, ast.Match):
            self.eval(node.subject)
            self.alternatives([*(case.body for case in node.cases), []])
        elif isinstance(node, ast.ClassDef):
            outer, self.env = self.env, dict(self.env)
            self.run([each for each in node.body if not isinstance(each, FUNCTIONS)])
            self.env = outer
        elif isinstance(node, FUNCTIONS):
            for default in (*node.args.defaults, *node.args.kw_defaults, *node.decorator_list):
                if default is not None:
                    self.eval(default)
            self.set(node.name, Value("function"))
        else:
            return False
        return True

    def loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        before = dict(self.env)
        # The second pass sees what the first has carried over; the outermost loop's is enough.
        passes = 1 if self.nested else 2
        self.nested += 1
        for _ in range(passes):
            if isinstance(node, ast.While):
                self.eval(node.test)
            else:
                self.bind(node.target, element(self.eval(node.iter)))
            self.run(node.body)
            self.join(before)
        self.nested -= 1
        self.run(node.orelse)

    def branches(self, node: ast.If) -> None:
        """An if with all its elifs, which the tree nests."""
        bodies: list[list[ast.stmt]] = []
        while True:
            self.eval(node.test)
            bodies.append(node.body)
            if len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
                node = node.orelse[0]
            else:
                break
        self.alternatives([*bodies, node.orelse])

    def alternatives(self, bodies: list[list[ast.stmt]]) -> None:
        before, results = dict(self.env), []
        for body in bodies:
            self.replace(before)
            self.run(body)
            if not (body and isinstance(body[-1], ast.Return | ast.Raise | ast.Continue)):
                results.append(dict(self.env))
        self.replace(results[0] if results else before)
        for other in results[1:]:
            self.join(other)

    def with_(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.eval(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, UNKNOWN)
        outer = self.records
        if node.body:
            inside = self.known.gradients.inside(self.index, node.body[0])
            self.records = outer and inside == "on"
        self.run(node.body)
        self.records = outer

    def replace(self, env: Env) -> None:
        """Put another environment in place: the module's own is shared."""
        self.env.clear()
        self.env.update(env)

    def join(self, other: Env) -> None:
        for name in self.env.keys() | other.keys():
            one, two = self.env.get(name), other.get(name)
            if one is None or two is None:
                # Bound on one way only: it is what it was bound to, or it does not exist.
                self.env[name] = (one or two) or UNKNOWN
            else:
                self.env[name] = joined(one, two)
