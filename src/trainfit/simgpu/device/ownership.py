"""Whose memory and work it is: modules, parameters and optimizers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from trainfit.results.text import dtype_name
from trainfit.simgpu.device.recorder import INPUT, RecordingBuilder
from trainfit.simgpu.device.sparse_tensor import SparseTensor
from trainfit.simgpu.device.tensor import DeviceTensor, allocation_of, plain
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.autograd import current_node, node_number, sequence_number
from trainfit.torch_private.modules import COMPILED, buffers_of, parameters_of
from trainfit.torch_private.operators import local_part


class Ownership:
    """Marks the recorder's allocations.

    ``parameters`` are the model's, as a recording's header has them, by allocation and offset.
    """

    def __init__(self, recorder: RecordingBuilder) -> None:
        self._recorder = recorder
        self._owners: dict[int, int] = {}
        self.parameters: dict[tuple[int, int], list[Any]] = {}

    def meet(self, module: torch.nn.Module, name: int) -> None:
        """A module is met for the first time: its parameters and buffers are known now."""
        for parameter in parameters_of(module).values():
            if parameter is not None:
                self._owners.setdefault(id(parameter), name)
                self.mark_parameter(parameter, name)
        for buffer in buffers_of(module).values():
            self.mark(buffer, "buffer", name)
        # The ids of a dead module's parameters may come back as another's.
        ids = [id(parameter) for parameter in parameters_of(module).values()]
        weakref.finalize(module, _forget, self._owners, ids).atexit = False

    def move(self, module: torch.nn.Module) -> None:
        """A module was moved; which path it has in a model is known when it is called."""
        for parameter in parameters_of(module).values():
            self.mark(parameter, "parameter")
        for buffer in buffers_of(module).values():
            self.mark(buffer, "buffer")

    def materialize(self, tensor: torch.Tensor) -> None:
        """A parameter or buffer of a lazy module got its shape."""
        if isinstance(tensor, torch.nn.Parameter):
            self.mark_parameter(tensor, self._owners.get(id(tensor), -1))
        else:
            self.mark(tensor, "buffer")

    def mark(self, tensor: Any, kind: str, module: int = -1) -> None:
        """Say what a tensor's memory is for (:data:`trainfit.results.runs.recording.KINDS`)."""
        if isinstance(tensor, SparseTensor):
            for part in tensor.parts:
                self.mark(part, kind, module)
            return
        if (number := self.allocation_of(tensor)) is not None:
            self._recorder.mark(number, kind, module)

    def allocation_of(self, tensor: Any) -> int | None:
        """The number of the allocation that this process has of a tensor; ``None``: of none."""
        return allocation_of(local_part(tensor))

    def is_copied(self, number: int) -> bool:
        """Was an allocation made for a copy of the host's data?"""
        return self._recorder.phase_of(number) == INPUT

    def mark_parameter(self, parameter: Any, module: int, *, trained: bool = False) -> None:
        """A parameter of a module that was called, or of an optimizer (``trained``)."""
        for part in _held(vars(parameter), _DEPTH):
            self.mark(part, "parameter", module)
        parameter = local_part(parameter)
        self.mark(parameter, "parameter", module)
        if not isinstance(parameter, DeviceTensor):
            return
        if (number := plain(parameter)._life.number) < 0:
            return
        # cuDNN's recurrent layers keep all of their weights in one allocation.
        place = number, int(parameter.storage_offset())
        known = self.parameters.get(place)
        if known is None:
            dtype = dtype_name(parameter.dtype)
            self.parameters[place] = [number, list(parameter.shape), dtype, trained]
        elif trained:
            known[3] = True

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer comes to update its parameters, by their gradients."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owner = self._owners.get(id(parameter), -1)
                self.mark_parameter(parameter, owner, trained=True)
                self.mark(parameter.grad, "gradient", owner)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It has updated them, and may have made state for it."""
        for parameter, state in optimizer.state.items():
            owner = self._owners.get(id(parameter), -1)
            for value in state.values() if isinstance(state, dict) else ():
                self.mark(value, "optimizer_state", owner)


#: A quantized weight's state has one of its own (bitsandbytes' double quantization).
_DEPTH = 3


def _held(attributes: Mapping[str, Any], depth: int) -> Iterator[DeviceTensor]:
    """What a parameter holds next to its elements: scales of a quantized weight, a shard of it; not
    what is named as a gradient."""
    for name, value in attributes.items():
        if "grad" in str(name):
            continue
        if isinstance(value, DeviceTensor):
            yield value
        elif depth > 1 and (_wraps(value) or not isinstance(value, _NO_HOLDERS)):
            inner = value if isinstance(value, dict) else getattr(value, "__dict__", None)
            yield from _held(inner, depth - 1) if isinstance(inner, dict) else ()


_NO_HOLDERS = (torch.Tensor, torch.nn.Module, type)


def _wraps(value: Any) -> bool:
    """Is it a tensor that others hold the elements of (packed ones of a quantized weight)?"""
    return isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__")


def _forget(owners: dict[int, int], parameters: list[int]) -> None:
    for parameter in parameters:
        owners.pop(parameter, None)


# ---
# Tracks the module of the model that an operator belongs to.


class ModuleTracker:
    """Follows the forward calls of modules by PyTorch's global module hooks.

    A backward operator is laid to the module whose forward call made its autograd node:
    nodes carry a sequence number, and the forward pass notes which module had which.
    """

    def __init__(
        self, recorder: RecordingBuilder, on_module: Callable[[torch.nn.Module, int], None]
    ) -> None:
        self._recorder = recorder
        self._on_module = on_module
        self._none = recorder.string("")
        self._stack: list[int] = []
        self._names: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._of_node: dict[int, int] = {}
        self.calls = 0
        #: Python modules that the classes of the models' modules are of.
        self.files: set[str] = set()
        #: Is told of every call, with the module and its positional arguments.
        self.on_call: Callable[[torch.nn.Module, Any], None] = lambda *_: None

    def install(self, patches: PatchSet) -> None:
        """Follow from now on, until ``patches`` is restored."""
        patches.see_calls(self._enter, self._leave)
        patches.on_restore(self._alive.clear, self._of_node.clear)

    def current(self, backward: bool) -> int:
        """String index of the current operator's module."""
        if self._stack:
            # Also true while checkpointing recomputes a forward pass inside backward.
            name = self._stack[-1]
            self._of_node.setdefault(sequence_number(), name)
            return name
        if backward:
            node = current_node()
            if node is not None:
                # The counter had passed the node's number when its operator was dispatched.
                return self._of_node.get(node_number(node) + 1, self._none)
        return self._none

    def step_end(self) -> None:
        """Forget the nodes of a finished step."""
        self._of_node.clear()

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            name = self._name(module)
        self.calls += 1
        self._stack.append(name)
        self.on_call(module, args)

    def _leave(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        if self._stack:
            self._stack.pop()

    def _name(self, module: torch.nn.Module) -> int:
        """Name a module met for the first time, and everything below it."""
        kind = type(module).__name__
        root = f"{self._recorder.text(self._stack[-1])}.<{kind}>" if self._stack else kind
        for path, child in module.named_modules():
            if id(child) not in self._names:
                # What torch.compile puts around a module is no part of its name.
                path = path.replace(f"{COMPILED}.", "").removesuffix(f".{COMPILED}")
                text = f"{root}.{path}" if path else root
                name = self._recorder.string(text)
                self._names[id(child)] = name
                self.files.add(type(child).__module__)
                # Weak, or the models of a search by trial would all stay in memory.
                forget = functools.partial(self._forget, id(child))
                self._alive[id(child)] = weakref.ref(child, forget)
                self._on_module(child, name)
        return self._names[id(module)]

    def _forget(self, key: int, _: Any) -> None:
        """A module died: its id may come back as another's."""
        self._names.pop(key, None)
        self._alive.pop(key, None)


def has_parameters(module: torch.nn.Module) -> bool:
    """Is it a model, or part of one, and no loss?"""
    return next(module.parameters(), None) is not None
