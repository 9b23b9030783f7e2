"""Operators with an implementation of their own, and what others attach to the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from trainfit.simgpu.device.determinism import refusal
from trainfit.torch_private import operators as private
from trainfit.torch_private.operators import has_kernel

#: Functions that operators call; the first argument is the engine.
Handler = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
KernelModel = Callable[[Any, tuple[Any, ...], Any], None]
Maker = Callable[[Any, Any, tuple[Any, ...]], Any]
LibraryFinder = Callable[[Any, tuple[Any, ...]], str | None]

#: Operators with their own implementation, and models of kernels' extra memory.
HANDLERS: dict[Any, Handler] = {}
KERNELS: dict[Any, KernelModel] = {}
#: What makes the results of operators that take extra memory between them.
MAKERS: dict[Any, Maker] = {}

#: The same by an operator's whole name: of packages that may be imported later.
NAMED_HANDLERS: dict[str, Handler] = {}

#: By an operator's name without "aten::": what finds the library that its kernel is from.
LIBRARY_OF: dict[str, LibraryFinder] = {}

#: Operators that are the engine's whatever device their tensors are on.
EVERYWHERE: set[Any] = set()

#: Operators that accept CPU tensors with dimensions alongside CUDA ones, as CUDA's kernels do.
MIXED_DEVICE: set[Any] = set()


def handles(*overloads: Any) -> Callable[[Handler], Handler]:
    """Register a function as the implementation of operators."""

    def register(function: Handler) -> Handler:
        for overload in overloads:
            HANDLERS[overload] = function
        return function

    return register


def handles_named(*names: str) -> Callable[[Handler], Handler]:
    """Register a function for operators by their whole names ("package::operator"), whatever their
    overload."""

    def register(function: Handler) -> Handler:
        NAMED_HANDLERS.update(dict.fromkeys(names, function))
        return function

    return register


def allocates(*overloads: Any) -> Callable[[KernelModel], KernelModel]:
    """Register a function that takes the extra memory of operators' kernels."""

    def register(function: KernelModel) -> KernelModel:
        for overload in overloads:
            KERNELS[overload] = function
        return function

    return register


def makes(*overloads: Any) -> Callable[[Maker], Maker]:
    """Register a function that makes operators' results, one after the other, from their geometry
    and the arguments."""

    def register(function: Maker) -> Maker:
        MAKERS.update(dict.fromkeys(overloads, function))
        return function

    return register


class OperatorInfo:
    """What the schema of an operator says, worked out once."""

    __slots__ = (
        "body", "composite", "fresh", "func", "handler", "inplace_view", "kernel", "launches",
        "library", "maker", "mutates", "name", "of_lists", "random", "refusal", "returns", "view",
        "written",
    )  # fmt: skip

    def __init__(self, func: Any, name: int) -> None:
        schema = private.schema(func)
        own = schema.name.removeprefix("aten::")
        self.func = func
        self.name = name
        self.handler = HANDLERS.get(func) or NAMED_HANDLERS.get(schema.name)
        self.kernel = KERNELS.get(func)
        self.maker = MAKERS.get(func)
        self.library = LIBRARY_OF.get(own)
        self.composite = self.handler is None and _is_composite(func)
        #: The operator as it is written in Python, where that is to be run.
        self.body = None if self.handler is not None else _body_of(func)
        self.mutates = schema.is_mutable
        #: Does its kernel itself count that the tensors of a list were changed in place? (foreach,
        #: ATen/native/cuda/Foreach*.cu; fused optimizers do not.)
        self.of_lists = self.mutates and schema.name.startswith("aten::_foreach_")
        self.inplace_view = torch.Tag.inplace_view in func.tags
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        #: What PyTorch raises of it while deterministic algorithms are on.
        self.refusal = None if own == schema.name else refusal(own, schema.overload_name)
        returned = [r.alias_info for r in schema.returns]
        self.view = any(a is not None and not a.is_write for a in returned)
        self.launches = not self.view and not self.composite and self.body is None
        written = {}
        #: The arguments that it writes to (index or name): fused optimizers return none of them.
        self.written: list[int | str] = []
        for index, argument in enumerate(schema.arguments):
            alias = argument.alias_info
            if alias is not None and alias.is_write:
                place = argument.name if argument.kwarg_only else index
                self.written.append(place)
                for mark in alias.before_set:
                    written[mark] = place
        #: For each return: the argument (index or name) that it is, or None if it is new.
        self.returns = [
            next((written[m] for m in a.before_set if m in written), None) if a else None
            for a in returned
        ]
        self.fresh = any(place is None for place in self.returns)


def _is_composite(func: Any) -> bool:
    """Is the operator nothing but calls of others on a GPU too?"""
    name = func.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CUDA")


def _body_of(func: Any) -> Callable[..., Any] | None:
    """What an operator defined in Python (``torch.library.custom_op``, ``triton_op``) consists of,
    if it is to be run for its result's shape.

    That is so without a registered fake kernel, and where the function itself is that one
    (``triton_op``): it allocates what it needs and launches its kernels. With a fake kernel the
    body may be anything, also a library's that takes addresses.
    """
    name = private.schema(func).name
    definition = private.python_operators.get(name)
    if definition is None:
        return None
    if private.fake_kernel(definition) is not None and not private.is_of_triton(definition):
        return None
    bodies = private.bodies(definition)
    body: Callable[..., Any] | None = bodies.get("cuda") or bodies.get(None)
    return body


# ---
# What others attach to the engine: modes, and callbacks for what happens in it.


LaunchListener = Callable[[OperatorInfo, Any, tuple[Any, ...], dict[str, Any], Any], None]


class Hooks:
    """Each does nothing until it is set."""

    def __init__(self) -> None:
        #: Makes the dispatch mode, which PyTorch takes off its stack to call the engine.
        self.mode: Callable[[Any], Any] = contextlib.nullcontext
        #: Makes the mode for Python that names devices.
        self.function_mode: Callable[[Any], Any] = contextlib.nullcontext
        #: Runs an operator on sparse tensors, given the engine.
        self.on_sparse: Handler = lambda *_: NotImplemented
        #: Called when a library is used for the first time.
        self.on_library: Callable[[], None] = lambda: None
        #: Called when the simulator starts to run (was the script running?), and when the script
        #: resumes.
        self.on_enter: Callable[[], bool] = lambda: False
        self.on_leave: Callable[[], None] = lambda: None
        #: Is told of every operator that may launch kernels, with its geometry's key.
        self.on_launch: LaunchListener = lambda *_: None
        #: Called after each operator that a thread of several runs (`communication.replicas`).
        self.on_done: Callable[[], None] = lambda: None
        #: Is told of two tensors, or one and a number of the script, and their sum, difference or
        #: product.
        self.on_arithmetic: Callable[[Any, Any, Any], None] = lambda *_: None
        #: … and of a tensor that the script itself makes a view of, and that.
        self.on_view: Callable[[Any, Any], None] = lambda *_: None
        #: … and of a function of PyTorch, what it got, and the tensor on the device that it gave;
        #: of one that changes all tensors of a list, too.
        self.on_result: Callable[[Any, Any, Any, Any], None] = lambda *_: None
        #: Is told when random numbers are drawn on the device.
        self.on_random: Callable[[], None] = lambda: None
