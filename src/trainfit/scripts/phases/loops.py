"""The loops of a script around the line that is running, read from its source.

How many epochs has ``for epoch in range(args.epochs):``; what comes after them, and does what is
in them go by their number? What a loop goes over is evaluated where the script runs: no more than
names, numbers, lists, and calls of ``range``, ``len`` and their like.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from trainfit.simgpu.device.user_location import is_library, locals_of

_PLAIN: Final = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.operator, ast.Load, ast.Call),
    *(ast.UnaryOp, ast.unaryop, ast.keyword, ast.Subscript, ast.List, ast.Tuple, ast.Store),
)
_CALLED: Final = ("range", "len", "int", "min", "max", "enumerate", "zip", "list", "reversed")
#: Modules of trainers that may know how many steps a training has.
_TRAINERS: Final = ("transformers.trainer", "lightning.pytorch.", "pytorch_lightning.")
#: Statements that no other one is within.
_SIMPLE: Final = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Import, ast.ImportFrom)
#: Progress bars, whose first argument is the range.
_BARS: Final = ("tqdm", "track")
_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
#: What can be gone over once more without a change.
_AGAIN: Final = (range, list, tuple, int)
#: Packages whose functions are called to make a step of an optimizer.
_OF_STEP: Final = ("accelerate", "torch", "trainfit")
#: The most rounds of a loop whose last one is looked for.
_MOST: Final = 1_000_000
#: Calls that need no memory of the GPU's, by their names' last word.
_LIGHT: Final = frozenset(
    (
        *("append", "items", "keys", "values", "update", "getattr", "isinstance", "len", "range"),
        *("float", "format", "int", "join", "max", "mean", "min", "round", "str", "sum"),
        *("close", "dump", "dumps", "exists", "exit", "finish", "makedirs", "mkdir", "open"),
        *("add_figure", "add_histogram", "add_scalar", "add_scalars", "add_text", "debug", "error"),
        *("info", "log", "log_dict", "log_metric", "log_metrics", "print", "save", "state_dict"),
        *("figure", "legend", "plot", "savefig", "show", "title", "warning", "write", "xlabel"),
        *("perf_counter", "set_description", "set_postfix", "time", "ylabel"),
        *("barrier", "collect", "destroy_process_group", "empty_cache", "synchronize"),
        *("manual_seed", "seed", "set_epoch"),
    )
)

#: How names of a script's own functions begin that draw or print no more than numbers.
_DRAWS: Final = ("plot_", "draw_", "print_", "log_")


def _list(make: Callable[..., Iterable[Any]], *args: Any, **kwargs: Any) -> list[Any]:
    """A list of what ``make`` gives for ranges and lists alone: a DataLoader would give its
    batches."""
    if not all(isinstance(argument, _AGAIN) for argument in args):
        raise TypeError
    return list(make(*args, **kwargs))


_MADE: Final = {
    make.__name__: functools.partial(_list, make) for make in (enumerate, zip, list, reversed)
}


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a source file, and how to end it.

    ``head`` are the first line and the last of what it goes over, ``first`` to ``last`` those of
    its body. ``over`` gives what it goes over, where that is a range, a list or the like, or what a
    ``while`` counts to (else ``None``, as that gives), ``iterates`` is its source (``None``: it is
    a ``while``). ``take`` assigns the value of ``_trainfit_value`` to its variables (``None``: it
    has none). ``after`` is the line that comes next in the same block or one around it, as the
    lines to jump to in turn (none: there is none, or it cannot be gone to), ``calls`` the function
    that makes what it goes over. ``by_number`` is the line at which something in it goes by its
    variables.
    """

    head: tuple[int, int]
    first: int
    last: int
    over: CodeType | None
    iterates: ast.expr | None
    take: CodeType | None
    after: tuple[int, ...]
    calls: str
    by_number: int | None


@dataclasses.dataclass(frozen=True)
class Course:
    """What is to come of a run, as its source says where it is now: lines ("file:line").

    ``after``: the first one after all loops that calls something which may need memory of the GPU.
    ``by_number``: where something goes by the number of an epoch. ``None``: there is none.
    """

    after: str | None = None
    by_number: str | None = None


def frames_of_user(frame: FrameType | None) -> list[FrameType]:
    """The user's frames from ``frame`` outwards, the outermost first."""
    frames: list[FrameType] = []
    while frame is not None:
        if not is_library(frame.f_code.co_filename) and frame.f_code.co_name != "<lambda>":
            frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def epochs_of(frame: FrameType | None) -> int | None:
    """Rounds of the loops around the one that goes over the data, which ``frame`` is within.

    ``None``: the data's loop is in none of the script's lines, or one around it has no known end.
    """
    counts: list[int] = []
    for each in frames_of_user(frame):
        for loop in loops_around(each):
            if loop.iterates is None:
                return None
            if _draws(each, loop):
                return math.prod(counts) if counts else None
            rounds = values_of(loop, each)
            if not isinstance(rounds, range):
                return math.prod(counts)
            counts.append(len(rounds))
    return None


def steps_of_trainer(frame: FrameType | None) -> int | None:
    """Optimizer steps of the training that ``frame`` is within, as a library's trainer has them;
    ``None``: it has no such number, or the training is none of a trainer's."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_TRAINERS):
            owner = locals_of(frame).get("self")
            for name in ("state", "trainer"):  # Transformers' state, Lightning's loops
                steps = getattr(getattr(owner, name, None), "max_steps", None)
                if type(steps) is int and steps > 0:
                    return steps
        frame = frame.f_back
    return None


def _draws(frame: FrameType, loop: Loop) -> bool:
    """Does it go over the data by an iterator that was made before it? Its rounds are batches."""
    scope = _scope(frame)
    nodes = [] if scope is None else [each for top in scope.body for each in ast.walk(top)]
    made: dict[str, list[int]] = {}
    for node in nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if called(node.value) == "iter" and isinstance(node.targets[0], ast.Name):
            made.setdefault(node.targets[0].id, []).append(node.lineno)
    within = range(loop.first, loop.last + 1)
    before = {name for name, lines in made.items() if not set(lines) & set(within)}
    return any(
        isinstance(each, ast.Name) and each.id in before and each.lineno in within for each in nodes
    )


def course_of(frame: FrameType | None) -> Course:
    """What comes after the loops around ``frame``, and in their later rounds."""
    frames = frames_of_user(frame)
    around = [(each, loop) for each in frames for loop in loops_around(each)]
    after = by_number = None
    # What follows in a function that a loop calls for a step is of the step, and in one that has no
    # more than the loop over the data, and is called by another loop, of an epoch's end.
    *outer, inner = [-1, *(place for place, each in enumerate(frames) if loops_around(each))]
    outside = _outside_callback(frame, frames) if inner < 0 else inner + 1
    if len(outer) > 1 and len(loops_around(frames[inner])) == 1:
        outside = outer[-1] + 1
    for each in reversed(frames[:outside]):
        line = _after(each)
        if line is not None and after is None:
            after = f"{each.f_code.co_filename}:{line}"
    for each, loop in around[: max(1, len(around) - 1)]:
        rounds = values_of(loop, each)
        if loop.by_number and rounds is not None and len(rounds) > 1:
            by_number = by_number or f"{each.f_code.co_filename}:{loop.by_number}"
    return Course(after, by_number)


def _outside_callback(frame: FrameType | None, frames: Sequence[FrameType]) -> int:
    """How many of the user's ``frames`` are outside the function that a library's loop calls for a
    step (Ignite's engine); all of them where a library makes the step."""
    called = None
    while frame is not None and is_library(frame.f_code.co_filename):
        called, frame = frame, frame.f_back
    name = "torch" if called is None else str(called.f_globals.get("__name__"))
    if name.partition(".")[0] not in _OF_STEP:
        return len(frames)
    while frame is not None and not is_library(frame.f_code.co_filename):
        frame = frame.f_back
    further = set(map(id, frames_of_user(frame)))
    return sum(id(each) in further for each in frames) or len(frames)


def values_of(loop: Loop, frame: FrameType) -> Sequence[Any] | None:
    """What the loop goes over, ``None`` where that cannot be told without a change to it."""
    if loop.over is None:
        return None
    try:
        over = eval(loop.over, frame.f_globals, {**locals_of(frame), **_MADE})
        return over if isinstance(over, range | list | tuple) and len(over) < _MOST else None
    except Exception:  # the user's names
        return None


def loops_around(frame: FrameType) -> list[Loop]:
    """The loops around the frame's line, the outermost first."""
    line, scope = frame.f_lineno, _scope(frame)
    return (
        [] if scope is None else [loop for loop in scope.loops if loop.first <= line <= loop.last]
    )


def _after(frame: FrameType) -> int | None:
    scope, line = _scope(frame), frame.f_lineno
    return None if scope is None else _heavy_after(scope.body, line)


def _heavy_after(body: Sequence[ast.stmt], line: int) -> int | None:
    """The first call in what follows ``line``, in the blocks around it and around their loops."""
    for place, node in enumerate(body):
        if not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        if not isinstance(node, ast.For | ast.While):
            for name in ("body", "orelse", "finalbody"):
                found = _heavy_after(getattr(node, name, ()) or (), line)
                if found is not None:
                    return found
        return next(filter(None, map(_heavy, body[place + 1 :])), None)
    return None


def _heavy(node: ast.AST) -> int | None:
    """The line of a call that may need the GPU's memory; functions that are made do not."""
    if isinstance(node, _SCOPES):
        return None
    if isinstance(node, ast.Call) and called(node) not in _LIGHT:
        return node.lineno
    return next(filter(None, map(_heavy, ast.iter_child_nodes(node))), None)


def called(call: ast.Call) -> str:
    """The last word of what is called."""
    return str(getattr(call.func, "id", getattr(call.func, "attr", "")))


@dataclasses.dataclass(frozen=True)
class _Scope:
    """A module, a function or a class: its lines, its statements, its loops."""

    first: int
    last: int
    body: Sequence[ast.stmt]
    loops: tuple[Loop, ...]


def _scope(frame: FrameType) -> _Scope | None:
    line = frame.f_lineno
    within = [
        scope for scope in _scopes(frame.f_code.co_filename) if scope.first <= line <= scope.last
    ]
    return max(within, key=lambda each: each.first, default=None)


@functools.cache
def tree_of(filename: str) -> ast.Module | None:
    """The source of a file, read once and not to be changed; ``None``: it cannot be read."""
    try:
        return ast.parse(Path(filename).read_bytes(), filename)
    except (OSError, SyntaxError, ValueError):
        return None


@functools.cache
def _scopes(filename: str) -> tuple[_Scope, ...]:
    tree = tree_of(filename)
    if tree is None:
        return ()
    last = max((each.end_lineno or 0 for each in tree.body), default=0)
    scopes = [_Scope(1, last, tree.body, tuple(_within(tree.body, filename)))]
    for node in ast.walk(tree):
        if isinstance(node, _SCOPES):
            loops = tuple(_within(node.body, filename))
            scopes.append(_Scope(node.lineno, node.end_lineno or 0, node.body, loops))
    return tuple(scopes)


def _within(body: Sequence[ast.stmt], filename: str, after: tuple[int, ...] = ()) -> Iterator[Loop]:
    """Loops of these statements, after which the jumps ``after`` go to the next line."""
    for place, node in enumerate(body):
        if isinstance(node, _SCOPES):
            continue
        then = _jumps(body, place + 1) if place + 1 < len(body) else after
        if isinstance(node, ast.For | ast.While):
            yield _loop(node, filename, _jumps(node.orelse, 0) if node.orelse else then)
            then = () if not node.orelse else then
        # A jump out of them would leave a context open.
        inner = () if isinstance(node, ast.For | ast.While | ast.With | ast.Try) else then
        for name in ("body", "orelse", "finalbody"):
            yield from _within(getattr(node, name, ()) or (), filename, inner)
        for case in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from _within(case.body, filename, inner)


def _jumps(body: Sequence[ast.stmt], place: int) -> tuple[int, ...]:
    """The lines to jump to out of a loop, so as to go on with the statement ``body[place]``.

    From Python 3.11 on the end of a ``with`` has its first line, too: CPython jumps there out of
    a loop, whose iterator it takes for the context's ``__exit__``. From another line of the block
    there is no iterator that could be taken for it.
    """
    line = body[place].lineno
    if not isinstance(body[place], ast.With | ast.AsyncWith):
        return (line,)
    plain = [node.lineno for node in body if isinstance(node, _SIMPLE) and _is_one_line(node)]
    first = min(plain, key=lambda each: abs(each - line), default=None)
    return () if first is None else (first, line)


def _is_one_line(node: ast.stmt) -> bool:
    """Has the line of a statement no loop of its own (a comprehension)?"""
    return node.lineno == node.end_lineno and not any(
        isinstance(each, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp)
        for each in ast.walk(node)
    )


def _loop(node: ast.For | ast.While, filename: str, after: tuple[int, ...]) -> Loop:
    last = node.body[-1].end_lineno or 0
    goes_over = node.iter if isinstance(node, ast.For) else node.test
    head = node.lineno, goes_over.end_lineno or node.lineno
    if isinstance(node, ast.While):
        over, take = _counted(node.test, filename)
        return Loop(head, node.body[0].lineno, last, over, None, take, after, "", None)
    names = _called_alike(node)
    plain = isinstance(node.target, ast.Name | ast.Tuple) and all(
        isinstance(each, ast.Name | ast.Tuple | ast.Store) for each in ast.walk(node.target)
    )
    return Loop(
        head,
        node.body[0].lineno,
        last,
        _code(node.iter, filename),
        node.iter,
        _taking(node.target, filename) if plain else None,
        after,
        node.iter.func.id
        if isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name)
        else "",
        _first_use(node.body, names, from_zero=_is_from_zero(node.iter)),
    )


def _counted(test: ast.expr, filename: str) -> tuple[CodeType | None, CodeType | None]:
    """Two codes for ``while epoch < epochs``: what is yet to be counted, and what sets the
    number."""
    if not isinstance(test, ast.Compare) or not isinstance(test.left, ast.Name | ast.Attribute):
        return None, None
    if len(test.ops) != 1 or not isinstance(test.ops[0], ast.Lt | ast.LtE | ast.NotEq):
        return None, None
    end = ast.unparse(test.comparators[0]) + " + 1" * isinstance(test.ops[0], ast.LtE)
    number = ast.unparse(test.left)
    left = ast.parse(f"range({number}, {end})", mode="eval").body
    target = ast.parse(f"{number} = 0").body[0]
    assert isinstance(target, ast.Assign)
    return _code(left, filename), _taking(target.targets[0], filename)


def _taking(target: ast.expr, filename: str) -> CodeType:
    take = ast.Assign([target], ast.Name("_trainfit_value", ast.Load()))
    return compile(ast.fix_missing_locations(ast.Module([take], [])), filename, "exec")


def _first_use(body: Iterable[ast.AST], names: frozenset[str], *, from_zero: bool) -> int | None:
    return next(filter(None, (_use(node, names, from_zero=from_zero) for node in body)), None)


def _use(node: ast.AST, names: frozenset[str], *, from_zero: bool) -> int | None:
    """The line at which one of these names decides something: no text, no log, no note of when
    something was, no part of a history, and nothing that the first round did, too."""
    if isinstance(node, ast.JoinedStr | ast.Slice) or _is_noted(node, names):
        return None
    if isinstance(node, ast.Call) and (called(node) in _LIGHT or called(node).startswith(_DRAWS)):
        return None
    if isinstance(node, ast.Call) and _is_of_schedule(node):
        return None
    if isinstance(node, ast.If) and all(map(_is_light, (*node.body, *node.orelse))):
        return None
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
        return node.lineno
    if from_zero and isinstance(node, ast.If) and _holds_at_first(node.test, names):
        return _first_use((*node.body, *node.orelse), names, from_zero=from_zero)
    return _first_use(ast.iter_child_nodes(node), names, from_zero=from_zero)


def _is_light(node: ast.stmt) -> bool:
    """Is it no more than a log, or a step of a schedule? A checkpoint is looked at."""
    if isinstance(node, ast.Pass):
        return True
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    name = called(node.value)
    return (name in _LIGHT and name != "save") or _is_of_schedule(node.value)


def _is_of_schedule(call: ast.Call) -> bool:
    """Is it ``scheduler.step(epoch)``? No memory goes by it, and schedules are looked at ahead."""
    match call.func:
        case ast.Attribute(value=schedule, attr="step"):
            return "sched" in ast.unparse(schedule).lower()
    return False


def _is_from_zero(over: ast.expr) -> bool:
    """Is it a range that begins at 0, maybe with a progress bar?"""
    over = _without_bar(over)
    return isinstance(over, ast.Call) and called(over) == "range" and len(over.args) == 1


def _holds_at_first(test: ast.expr, names: frozenset[str]) -> bool:
    """Is it true of 0 (``epoch % 10 == 0``, or that or another)? Then the first round did it."""
    match test:
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(_holds_at_first(value, names) for value in values)
        case ast.Compare(left=rest, ops=[ast.Eq()], comparators=[ast.Constant(value=0)]):
            pass
        case ast.UnaryOp(op=ast.Not(), operand=rest):
            pass
        case _:
            return False
    match rest:
        case ast.BinOp(left=ast.Name(id=name), op=ast.Mod()):
            return name in names
    return False


def _called_alike(loop: ast.For) -> frozenset[str]:
    """The variables of a loop, and those that are no more than another name of one, or count from
    another number (``best_epoch = epoch + 1``)."""
    names = {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
    for node in (each for top in loop.body for each in ast.walk(top)):
        if isinstance(node, ast.Assign) and _is_number(node.value, names):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def _is_noted(node: ast.AST, names: frozenset[str]) -> bool:
    """Is one of these names no more than kept, as in ``best = epoch, loss, model.state_dict()`` or
    ``checkpoint = {"epoch": epoch}``?"""
    if not isinstance(node, ast.Assign):
        return False
    parts = _parts(node.value)
    kept = [part for part in parts if _is_number(part, names)]
    others = [part for part in parts if part not in kept]
    return bool(kept) and _first_use(others, names, from_zero=False) is None


def _is_number(node: ast.expr, names: Collection[str]) -> bool:
    """Is it one of these names, or so many more or less?"""
    match node:
        case ast.BinOp(left=number, op=ast.Add() | ast.Sub(), right=ast.Constant()):
            return _is_number(number, names)
        case ast.Name(id=name):
            return name in names
    return False


def _parts(value: ast.expr) -> list[ast.expr]:
    """What a tuple, a list or a dictionary is made of; of another value, itself."""
    match value:
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Dict(values=parts):
            return parts
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=given):
            return [each.value for each in given]
        case _:
            return [value]


def _without_bar(over: ast.expr) -> ast.expr:
    """What a progress bar goes over, or what has none."""
    if isinstance(over, ast.Call) and over.args and called(over) in _BARS:
        return over.args[0]
    return over


def _code(over: ast.expr, filename: str) -> CodeType:
    """Gives what it is, where that is plain; otherwise ``None``."""
    over = _without_bar(over)
    calls = [call.func for call in ast.walk(over) if isinstance(call, ast.Call)]
    plain = all(isinstance(each, _PLAIN) for each in ast.walk(over))
    if not plain or any(getattr(call, "id", "") not in _CALLED for call in calls):
        over = ast.Constant(None)
    return compile(ast.fix_missing_locations(ast.Expression(over)), filename, "eval")


# ---
# Which loader ends an epoch, where a training step takes batches of several.
#
# ``for one, other in zip(a, b)`` ends with the shorter one, with ``cycle(a)`` in it with ``b``, and
# what the body takes by ``next()`` does not end it. Read from the loop that the step is in.


#: Calls that go over their first argument; over all, to the end of the shortest; of the longest;
#: for ever.
_FIRST: Final = frozenset(("enumerate", "tqdm", "track", "iter", "islice", "prefetch"))
_SHORTEST: Final = frozenset(("zip",))
_LONGEST: Final = frozenset(("zip_longest",))
_ENDLESS: Final = frozenset(("cycle", "repeat", "count"))
#: Objects within one another that are looked into.
_DEPTH: Final = 4

#: A loader with its batches; one that never ends is none.
_Sized = tuple[float, Any]


def ends_epoch(frame: FrameType | None, combined: Any = None) -> Any:
    """The loader whose end is that of the loop over data around ``frame``, or of a trainer's
    ``combined`` loader; ``None`` where the source does not tell."""
    for each in reversed(frames_of_user(frame)):
        for loop in reversed(loops_around(each)):
            if loop.iterates is None:
                continue
            found = _of_source(loop.iterates, {**each.f_globals, **locals_of(each)})
            if found is not None:
                return found[1]
    found = None if combined is None else _of_object(combined)
    return None if found is None else found[1]


def _of_source(node: ast.expr, names: Mapping[str, Any]) -> _Sized | None:
    if isinstance(node, ast.Call):
        name = called(node)
        if name in _ENDLESS:
            return math.inf, None
        if not node.args or name not in _FIRST | _SHORTEST | _LONGEST:
            return None
        if name in _FIRST:
            return _of_source(node.args[0], names)
        return _chosen([_of_source(argument, names) for argument in node.args], name in _LONGEST)
    if not isinstance(node, ast.Name | ast.Attribute):
        return None
    parts = ast.unparse(node).split(".")
    value = names.get(parts[0])
    for part in parts[1:]:
        value = getattr(value, part, None)
    return _of_object(value)


def _of_object(value: Any, depth: int = _DEPTH) -> _Sized | None:
    if type(value).__name__ in _ENDLESS:
        return math.inf, None
    if depth and (inner := getattr(value, "iterable", None)) is not None:  # of a progress bar
        return _of_object(inner, depth - 1)
    if depth and hasattr(value, "flattened") and hasattr(value, "_mode"):  # Lightning's
        parts = [_of_object(each, depth - 1) for each in value.flattened]
        return _chosen(parts, not str(value._mode).startswith("min"))
    if not hasattr(value, "dataset") or not hasattr(value, "batch_sampler"):
        return None
    try:
        return len(value), value
    except (TypeError, NotImplementedError, AttributeError):
        return math.inf, value


def _chosen(parts: Iterable[_Sized | None], longest: bool) -> _Sized | None:
    known = [part for part in parts if part is not None]
    choose = max if longest else min
    return choose(known, key=lambda each: each[0]) if known else None
