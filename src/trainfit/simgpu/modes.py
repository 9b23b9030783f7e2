"""The two PyTorch modes that route work to the engine, in every thread.

Simulated tensors reach the engine by themselves. The modes are for what has no simulated
argument yet: factories with ``device="cuda"``, copies from the host, and what C++ builds
on "meta" because it was told that simulated tensors are there.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatch_modes
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.simgpu.engine import Engine
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.tensor import CUDA, SimulatedTensor

_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_WITH_POSITIONAL_DEVICE = {torch.Tensor.to, torch.Tensor.cuda}


class DeviceMode(TorchDispatchMode):
    """Sends operators with a CUDA (or C++'s "meta") device keyword to the engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import torch._dynamo (seconds) at the first operator, for nothing.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if SimulatedTensor in types:
            return self._engine.run(func, args, kwargs)
        device = kwargs.get("device")
        if device is not None and (
            device.type == "cuda" or (device.type == "meta" and not self._engine.explicit_meta)
        ):
            return self._engine.run(func, args, kwargs)
        return func(*args, **kwargs)


class FunctionMode(TorchFunctionMode):
    """Completes bare ``"cuda"`` devices and notes when the user asks for meta tensors."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _WITH_POSITIONAL_DEVICE:
            args = tuple(_indexed(each) for each in args)
            if func is torch.Tensor.cuda:
                func, args, kwargs = _cuda_as_to(args, kwargs)
        elif func is _set_data and type(args[1]) is SimulatedTensor:
            return move_parameter(args[0], args[1])
        if not kwargs:
            return func(*args)
        device = kwargs.get("device")
        if device is None:
            return func(*args, **kwargs)
        kwargs = dict(kwargs)
        device = kwargs["device"] = _indexed(device)
        if isinstance(device, torch.device) and device.type == "meta":
            self._engine.explicit_meta += 1
            try:
                return func(*args, **kwargs)
            finally:
                self._engine.explicit_meta -= 1
        return func(*args, **kwargs)


def _indexed(value: Any) -> Any:
    """A device without an index becomes one with; anything else stays as it is."""
    if isinstance(value, str):
        if value.startswith(("cuda", "meta")):
            value = torch.device(value)
        else:
            return value
    if isinstance(value, torch.device) and value.type == "cuda":
        if value.index not in (None, 0):
            raise RuntimeError(
                "CUDA error: invalid device ordinal (the simulated machine has one GPU, cuda:0)"
            )
        return CUDA
    return value


def _cuda_as_to(args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    kwargs = dict(kwargs or {})
    kwargs.pop("device", None)
    return torch.Tensor.to, (args[0], CUDA), kwargs


def move_parameter(target: torch.Tensor, value: torch.Tensor) -> None:
    """``host_tensor.data = simulated_tensor``: ``target`` moves and stays the same object."""
    if type(target) is SimulatedTensor:
        target.data = value
        return
    moved = value.detach()
    moved.requires_grad_(target.requires_grad)
    if isinstance(target, torch.nn.Parameter):
        moved = torch.nn.Parameter(moved, requires_grad=target.requires_grad)
    torch.utils.swap_tensors(target, moved)


class Modes:
    """Keeps the two modes on the stacks of all threads while a simulation is active."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mine: list[Any] = []

    def install(self, patches: PatchSet) -> None:
        bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
        engine = self._engine

        def bootstrap_with_modes(thread: threading.Thread) -> None:
            with FunctionMode(engine), DeviceMode(engine):
                bootstrap(thread)

        patches.set(threading.Thread, "_bootstrap_inner", bootstrap_with_modes)
        self._mine = [FunctionMode(self._engine), DeviceMode(self._engine)]
        for mode in self._mine:
            mode.__enter__()
        _leave_in_child(self)

    def remove(self) -> None:
        for mode in reversed(self._mine):
            mode.__exit__(None, None, None)
        self._mine = []

    def drop(self) -> None:
        """Take the modes off this thread's stacks, whatever lies on top of them."""
        kept = []
        for _ in range(torch._C._len_torch_function_stack()):
            mode = _pop_mode()
            if not isinstance(mode, FunctionMode):
                kept.append(mode)
        for mode in reversed(kept):
            _push_mode(mode)
        others = []
        for _ in range(torch._C._len_torch_dispatch_stack()):
            dispatch = dispatch_modes._pop_mode()
            if not isinstance(dispatch, DeviceMode):
                others.append(dispatch)
        for dispatch in reversed(others):
            dispatch_modes._push_mode(dispatch)
        self._mine = []


_active: weakref.ref[Modes] | None = None
_registered = False


def _leave_in_child(modes: Modes) -> None:
    """DataLoader workers are forked with the modes active; their CPU work must not pay."""
    global _active, _registered
    _active = weakref.ref(modes)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    modes = _active() if _active is not None else None
    if modes is not None and modes._mine:
        modes.drop()
