"""Copies from the host's memory that each step repeats: of a tensor that could be on the GPU, or of
one that could be made there."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Final

import torch

from trainfit.findings.source_code import file_syntax
from trainfit.results.runs.steps import HostCopy
from trainfit.simgpu.device.user_location import call_of_user
from trainfit.torch_private.operators import no_dispatch, version

#: Bytes of the largest tensor whose numbers are compared; a larger one is known by its identity.
_COMPARED: Final = 1 << 20
#: Steps in a row, after the first, that show it.
_STEPS: Final = 2
#: What moves a tensor, and what makes one of nothing but sizes and numbers.
_MOVES: Final = ("to", "cuda")
_MAKES: Final = frozenset(
    (
        *("zeros", "ones", "full", "arange", "linspace", "eye", "empty", "tensor", "triu", "tril"),
        *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "zeros_like", "ones_like"),
        *("rand_like", "randn_like", "full_like", "FloatTensor", "LongTensor", "Tensor"),
    )
)


@dataclasses.dataclass
class _Line:
    """Copies of a line: of this step and of the one before, each by identity and by content."""

    of_step: list[tuple[weakref.ref[torch.Tensor], int, int]] = dataclasses.field(
        default_factory=list
    )
    before: list[tuple[weakref.ref[torch.Tensor], int, int]] = dataclasses.field(
        default_factory=list
    )
    nbytes: int = 0
    is_in_module: bool = True
    #: Steps in a row that copied something; … the same objects, … the same numbers as before.
    steps: int = 0
    same_objects: int = 0
    same_numbers: int = 0


class Uploads:
    """Follows copies that the host waits for, by the user's line; ``module`` tells the path of the
    module that is called now (empty: none is)."""

    def __init__(self, module: Callable[[], str]) -> None:
        self._module = module
        self._lines: dict[str, _Line] = {}
        self._steps = 0

    def copied(self, source: torch.Tensor) -> None:
        """A copy of ``source`` to the GPU begins."""
        place = call_of_user() if self._steps else None
        if place is None:  # of the first step, which has what comes before it, or a library's
            return
        line = self._lines.setdefault(place, _Line())
        line.of_step.append((weakref.ref(source), version(source), _digest(source)))
        line.nbytes += source.numel() * source.element_size()
        line.is_in_module &= bool(self._module())

    def step_ended(self) -> None:
        """A training step is over."""
        self._steps += 1
        for line in self._lines.values():
            if not line.of_step:
                line.steps = 0
                continue
            line.steps += 1
            objects = [(ref(), now) for ref, now, _ in line.of_step]
            then = [(ref(), now) for ref, now, _ in line.before]
            is_alive = all(each is not None for each, _ in (*objects, *then))
            same = len(objects) == len(then) and is_alive and all(
                one is other and now == before
                for (one, now), (other, before) in zip(objects, then, strict=True)
            )  # fmt: skip
            line.same_objects = line.same_objects + 1 if same else 0
            numbers = [each for _, _, each in line.of_step]
            alike = bool(numbers) and numbers == [each for _, _, each in line.before]
            line.same_numbers = line.same_numbers + 1 if alike and all(numbers) else 0
            line.before, line.of_step = line.of_step, []

    def found(self) -> Iterator[HostCopy]:
        """Lines that copied in each step what need not be copied."""
        seen = {place: line for place, line in self._lines.items() if line.steps > _STEPS - 1}
        # Where nothing else is copied, that is the batch of a script that times itself.
        has_batches = any(not line.same_objects for line in seen.values())
        for place, line in seen.items():
            times, receiver = len(line.before), _receiver(place)
            nbytes = line.nbytes // line.steps
            is_same = line.same_objects >= _STEPS - 1
            is_alike = line.same_numbers >= _STEPS - 1 and line.is_in_module and receiver.is_own
            if is_same and line.is_in_module:
                is_wanted = receiver.is_given
            else:
                is_wanted = not has_batches if is_same else not (receiver.is_made or is_alike)
            if not is_wanted:
                yield HostCopy(place, nbytes, times, is_made=not is_same)


def _digest(source: torch.Tensor) -> int:
    """A checksum of a tensor's numbers; 0 where they are too many."""
    if source.numel() * source.element_size() > _COMPARED or source.device.type != "cpu":
        return 0
    with contextlib.suppress(Exception), no_dispatch():  # of a type that NumPy has not
        plain = source.detach().contiguous().view(-1).view(torch.uint8)
        return zlib.crc32(plain.numpy().tobytes(), 1) or 1
    return 0


@dataclasses.dataclass(frozen=True)
class _Receiver:
    """What a line moves: made in it, a variable of the function's own, or what it was given."""

    is_made: bool = False
    is_own: bool = False
    is_given: bool = False


def _receiver(place: str) -> _Receiver:
    file, _, number = place.rpartition(":")
    tree = file_syntax(file)
    if tree is None:
        return _Receiver()
    line = int(number)
    moved = [
        node.func.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _MOVES
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not moved:
        return _Receiver()
    given, made = _given_at(tree, line), _made_at(tree, line)
    roots = [_root(each) for each in moved]
    is_given = any(root in given for root in roots)
    are_made = all(_is_made(each) or path in made for each, path in zip(moved, roots, strict=True))
    return _Receiver(are_made, not is_given and None not in roots, is_given)


def _made_at(tree: ast.Module, line: int) -> set[str]:
    """Variables of the innermost function around a line that constructors give their value."""
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or line)
    ]
    if not functions:
        return set()
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(functions[-1]):
        if isinstance(node, ast.Assign) and node.lineno < line:
            for target in node.targets:
                if isinstance(target, ast.Name):
                    assigned.setdefault(target.id, []).append(node.value)
    return {name for name, values in assigned.items() if all(map(_is_made, values))}


def _is_made(node: ast.expr) -> bool:
    """``torch.zeros(2).long()``: is it of a constructor's call?"""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id == "torch":
            return node.func.attr in _MAKES and not any(
                keyword.arg == "device" for keyword in node.keywords
            )
        node = owner
    return False


def _root(node: ast.expr) -> str | None:
    """The variable that an expression begins with; ``None``: it is none."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return None
    return node.id


def _given_at(tree: ast.Module, line: int) -> set[str]:
    """Names that the innermost function around a line is given, or that a loop there goes over:
    all but the object whose method it is."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.For | ast.Lambda | ast.comprehension)
        and getattr(node, "lineno", line) <= line <= (getattr(node, "end_lineno", line) or line)
    ]
    found: set[str] = set()
    for node in around:
        if isinstance(node, ast.For | ast.comprehension):
            found |= {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        names = [
            argument.arg for argument in (*arguments, node.args.vararg, node.args.kwarg) if argument
        ]
        found |= {name for name in names if name != "self"}
    return found
