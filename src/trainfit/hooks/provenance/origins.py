"""How tensors came to be what they are: which lines changed their number of samples, cut off their
graph, or computed them in an earlier step. An exception is explained by those of its operands."""

from __future__ import annotations

import ast
import linecache
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from trainfit.findings.source_code import parsed
from trainfit.hooks.held_objects import walk
from trainfit.hooks.provenance.cuts import Marks, tensors_among
from trainfit.results.runs.operands import (
    INDEXING,
    NO_CALL,
    RENORMED,
    STEPPED,
    WRONG_INDEX,
    FailedCall,
    Operand,
    Origin,
)
from trainfit.results.text import dtype_name
from trainfit.simgpu.device.user_location import is_library, locals_of
from trainfit.torch_private.autograd import needs_changed

#: Of one tensor, functions that are remembered in a row: a training that never ends has no end of
#: them.
_DEEPEST: Final = 400
#: Functions behind a tensor that are looked at, operands and origins that are told.
_MOST: Final = 4000
_OPERANDS: Final = 4
#: Changes in place that are remembered.
_CHANGES: Final = 32
#: Results that are remembered though nothing holds them, and of one line that are told.
_RECENT: Final = 8
_WITHIN: Final = 2
#: What gives no tensor of its own making: a property, a switch, what hands a gradient out.
_NOT_MADE: Final = {"grad", "requires_grad_", "retain_grad", "detach_", "data"}
#: Operators of layers.
_LAYERS: Final = {"linear", "conv1d", "conv2d", "conv3d", "conv_transpose2d", "matmul", "addmm"}
#: torch/csrc/autograd/saved_variable.cpp
_IN_PLACE: Final = "modified by an inplace operation"
#: Names of what a call of PyTorch's Python has that are none of its operands.
_NOT_OPERANDS: Final = {"weight", "bias", "running_mean", "running_var"}


class _Made(NamedTuple):
    """A result: the function and the line that gave it, the shapes, in which step; whether it has a
    graph, lost that of what it was made of; the results that it was made of."""

    operator: str
    place: str
    given: tuple[int, ...]
    gave: tuple[int, ...]
    step: int
    has_graph: bool
    is_cut: bool
    with_tensor: bool
    of: tuple[_Made, ...]
    depth: int


class TensorOrigins:
    """Remembers what made each tensor that lives; ``place`` gives the line that is running,
    ``steps`` how many were begun."""

    def __init__(self, place: Callable[[], str | None], steps: Callable[[], int]) -> None:
        self._place, self._steps = place, steps
        self._made: Marks[_Made] = Marks()
        self._changed: deque[Origin] = deque(maxlen=_CHANGES)
        self._recent: deque[_Made] = deque(maxlen=_RECENT)
        #: The last function of this step that gave a result without a graph.
        self._last_cut: tuple[int, Origin] | None = None

    def gave(self, name: str, args: Sequence[Any], result: torch.Tensor) -> None:
        """A function of PyTorch gave a tensor."""
        if name in _NOT_MADE:
            return
        given = tensors_among(args)
        if given and given[0] is result and torch.is_grad_enabled():
            self._changed.appendleft(self._change(name, result))
        of = tuple(made for tensor in given if (made := self._made.of(tensor)) is not None)
        depth = 1 + max((each.depth for each in of), default=0)
        if depth > _DEEPEST:
            of, depth = (), 1
        first = given[0] if given else result
        has_graph = result.requires_grad
        made = _Made(
            INDEXING if "getitem" in name else name.strip("_"),
            self._place() or "",
            _sizes(first),
            _sizes(result),
            self._steps(),
            has_graph,
            not has_graph and any(tensor.requires_grad for tensor in given),
            len(given) > 1,
            of,
            depth,
        )
        self._made.put(result, made)
        self._recent.appendleft(made)
        if made.is_cut and result.numel() > 1:
            cut = Origin("cut", made.operator, made.given, made.gave, made.place)
            self._last_cut = made.step, cut

    def renorms(self, weight: Any) -> None:
        """An embedding with a ``max_norm`` is about to change its weight, in C++."""
        if isinstance(weight, torch.Tensor):
            self._changed.appendleft(self._change(RENORMED, weight))

    def steps(self) -> None:
        """An optimizer is about to change weights."""
        if place := self._place():
            self._changed.appendleft(Origin("in_place", STEPPED, (), (), place))

    def assigns(self, tensor: Any) -> None:
        """Numbers were put into a part of a tensor: ``x[…] = …``."""
        if isinstance(tensor, torch.Tensor) and torch.is_grad_enabled():
            self._changed.appendleft(self._change("x[…] = …", tensor))

    def _change(self, name: str, tensor: torch.Tensor) -> Origin:
        known, shape = self._made.of(tensor), tuple(tensor.shape)
        by = "" if known is None else known.operator
        return Origin("in_place", name.strip("_"), shape, shape, self._place() or "", by)

    def goes_back_to(self, tensor: Any, operators: Container[str]) -> bool:
        """Was a tensor computed of what a layer made of the results of one of these operators?"""
        made = self._made.of(tensor) if isinstance(tensor, torch.Tensor) else None
        layers = (each for each in _behind(made) if each.operator in _LAYERS) if made else ()
        return any(each.operator in operators for layer in layers for each in _behind(layer))

    def of_failure(self, error: BaseException) -> FailedCall:
        """What the call was given that an exception came from; nothing may come of it."""
        try:
            return self._of(error)
        except Exception:
            return NO_CALL

    def _of(self, error: BaseException) -> FailedCall:
        frames = _frames(error.__traceback__)
        users = [number for number, (frame, _) in enumerate(frames) if _is_users(frame)]
        if not users:
            return NO_CALL
        named: dict[str, Any]
        user, line = frames[users[-1]]
        behind = [frame for frame, _ in frames[users[-1] + 1 :]]
        module = _module_of(behind)
        within: list[Operand] = []
        named = dict(_of_call(behind))
        if not named:
            named = dict(_of_line(user, line))
            within = self._within(f"{user.f_code.co_filename}:{line}", named)
        told = [self._operand(name, each) for name, each in named.items()]
        operands = (*within, *told)[:_OPERANDS]
        if module is None:
            by, at = self._needed(named.get("loss")) if _IN_PLACE in str(error) else ("", "")
            return FailedCall(
                operands=operands, changed=tuple(self._changed), needed_by=by, needed_at=at
            )
        index = getattr(error, WRONG_INDEX, None)
        layer, listed = _name_of(module, [frame for frame, _ in frames])
        weight = getattr(module, "weight", None)
        sizes = tuple(weight.shape) if isinstance(weight, torch.Tensor) else ()
        kind = type(module).__name__
        return FailedCall(layer, kind, listed, sizes, operands, wrong_index=index)

    def _needed(self, loss: Any) -> tuple[str, str]:
        """The operator behind a loss that needs what was changed in place, and its line."""
        operator = needs_changed(loss.grad_fn) if isinstance(loss, torch.Tensor) else None
        if operator is None:
            return "", ""
        name, made = operator.lower(), self._made.of(loss)
        lines = {
            each.place
            for each in (_behind(made) if made is not None else ())
            if each.operator.replace("_", "") == name
        }
        return name, lines.pop() if len(lines) == 1 else ""

    def _within(self, place: str, named: dict[str, Any]) -> list[Operand]:
        """Results of the line that failed, which have no names; what they were made of goes from
        those that have one."""
        found: list[_Made] = []
        for each in self._recent:
            if each.place != place or each.step != self._steps() or len(found) == _WITHIN:
                break
            if not any(each is source for later in found for source in _behind(later)):
                found.append(each)
        used = [source for each in self._recent if each.place == place for source in each.of]
        for name, value in [*named.items()]:
            if any(
                isinstance(value, torch.Tensor) and self._made.of(value) is source
                for source in used
            ):
                del named[name]
        return [Operand(f"{each.operator}(…)", each.gave, "", "") for each in found]

    def _operand(self, name: str, tensor: Any) -> Operand:
        if isinstance(tensor, np.ndarray):
            return Operand(name, tuple(tensor.shape), str(tensor.dtype), "cpu")
        shape, dtype = _sizes(tensor), dtype_name(tensor.dtype)
        made = self._made.of(tensor)
        operand = Operand(name, shape, dtype, tensor.device.type)
        if made is None:
            step, cut = self._last_cut or (-1, None)
            is_lost = name == "loss" and tensor.grad_fn is None and step == self._steps()
            if is_lost and cut is not None:  # it came by way of NumPy, or of numbers
                return Operand(name, shape, dtype, tensor.device.type, (cut,))
            return operand
        origins = (_changed("shape", made), _changed("samples", made), _cut(made), _earlier(made))
        found = tuple(origin for origin in origins if origin is not None)
        return Operand(name, shape, dtype, tensor.device.type, found)


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's shape; -1 for the dimension of a nested tensor that has many sizes."""
    return tuple(number if isinstance(number, int) else -1 for number in tensor.shape)


def _changed(how: Literal["shape", "samples"], made: _Made) -> Origin | None:
    """The last function that changed the shape, or its first dimension, on the way to a result."""
    until = 1 if how == "samples" else None
    at: _Made | None = made
    while at is not None:
        # A mask may leave as many rows as there were samples.
        by_mask = at.operator == INDEXING and at.with_tensor
        if at.given and (by_mask or at.given[:until] != at.gave[:until]):
            return Origin(how, at.operator, at.given, at.gave, at.place, "", at.with_tensor)
        at = next(iter(at.of), None)
    return None


def _cut(made: _Made) -> Origin | None:
    """The last function that gave a result without a graph."""
    return next(
        (
            Origin("cut", each.operator, each.given, each.gave, each.place)
            for each in _behind(made)
            if each.is_cut
        ),
        None,
    )


def _earlier(made: _Made) -> Origin | None:
    """A result with a graph of an earlier step, that something of this step was made of."""
    for each in _behind(made):
        for source in each.of:
            if each.step == made.step > source.step and source.has_graph:
                return Origin(
                    "earlier", source.operator, source.given, source.gave, source.place, each.place
                )
    return None


def _behind(made: _Made) -> Iterator[_Made]:
    waiting, known = deque([made]), {id(made)}
    while waiting and len(known) < _MOST:
        each = waiting.popleft()
        yield each
        following = [source for source in each.of if id(source) not in known]
        known.update(map(id, following))
        waiting.extend(following)


# ---
# What a traceback's frames hold.


def _frames(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    frames = []
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return frames


def _is_users(frame: FrameType) -> bool:
    return not is_library(frame.f_code.co_filename)


def _is_forward(frame: FrameType) -> bool:
    return frame.f_code.co_name == "forward" and _is_of_torch(frame)


def _is_of_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).split(".")[0] == "torch"


def _module_of(behind: Sequence[FrameType]) -> torch.nn.Module | None:
    """The innermost layer of PyTorch's among these frames."""
    module = None
    for frame in filter(_is_forward, behind):
        owner = locals_of(frame).get("self")
        if isinstance(owner, torch.nn.Module):
            module = owner
    return module


def _of_call(behind: Sequence[FrameType]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the innermost function of ``torch.nn.functional``, or layer, was given; of a
    backward pass the tensor that it begins from."""
    for frame in reversed(behind):
        name, module = frame.f_code.co_name, str(frame.f_globals.get("__name__", ""))
        given = locals_of(frame)
        is_backward = name == "backward" and module.startswith("torch.")
        begins = is_backward and isinstance(given.get("self"), torch.Tensor)
        if not (module == "torch.nn.functional" or begins or _is_forward(frame)):
            continue
        arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        found = [
            ("loss" if begins else key, given[key])
            for key in arguments
            if isinstance(given.get(key), torch.Tensor) and key not in _NOT_OPERANDS
        ]
        if found:
            yield from found
            return


def _of_line(frame: FrameType, line: int) -> Iterator[tuple[str, Any]]:
    """The tensors and arrays that a line of the script names: variables, attributes of self."""
    text = linecache.getline(frame.f_code.co_filename, line).strip().rstrip(":")
    if (tree := parsed(text)) is None:
        return
    known: Mapping[str, Any] = {**frame.f_globals, **locals_of(frame)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            value = known.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            value = _attribute(known.get(node.value.id), node.attr)
        else:
            continue
        if isinstance(value, torch.Tensor | np.ndarray):
            yield ast.unparse(node), value


def _attribute(owner: Any, name: str) -> Any:
    """The attribute as it is stored: no property of the script's own runs."""
    held = getattr(owner, "__dict__", {}).get(name)
    if held is not None or not isinstance(owner, torch.nn.Module):
        return held
    named = (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False))
    return dict(named).get(name)


def _name_of(module: torch.nn.Module, frames: Sequence[FrameType]) -> tuple[str, str]:
    """What the innermost class of the script's calls a layer, and the attribute of a plain list or
    dict that it is in."""
    for frame in reversed(frames):
        if not _is_users(frame):
            continue
        given = locals_of(frame)
        owner = given.get("self")
        if isinstance(owner, torch.nn.Module):
            for name, each in owner.named_modules(prefix="self"):
                if each is module:
                    return _indexed(name), ""
            for name, value in vars(owner).items():
                if isinstance(value, list | tuple | dict) and not name.startswith("_"):
                    for path, each in walk(value, f"self.{name}"):
                        if each is module:
                            return path, f"self.{name}"
            continue
        for name, each in {**frame.f_globals, **given}.items():
            if isinstance(each, torch.nn.Module):
                for path, part in each.named_modules(prefix=name):
                    if part is module:
                        return _indexed(path), ""
    return "", ""


def _indexed(path: str) -> str:
    """ "self.body.0.conv" as code: "self.body[0].conv"."""
    first, *others = path.split(".")
    return first + "".join(f"[{each}]" if each.isdecimal() else f".{each}" for each in others)
