"""Device names in scripts, hidden from C++ code.

C++ of a CPU build refuses ``"cuda"`` without an index, a bare ``0``, the legacy tensor
types and pinned memory. Python code that goes through here does not notice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.tensor import CPU, CUDA, DeviceTensor, check_ordinal
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private import operators as private

_LEGACY = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


def complete(value: Any) -> Any:
    """A device argument with its index; what is no device, or another's, stays as it is."""
    if isinstance(value, str):
        if not value.startswith(("cuda", "meta")):
            return value
        value = torch.device(value)
    elif type(value) is int:
        value = torch.device("cuda", value)
    if isinstance(value, torch.device) and value.type == "cuda":
        check_ordinal(value)
        return CUDA
    return value


def construct(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """``torch.device(...)``: a bare number is a GPU's, whether there is such a one or not."""
    given = args[0] if args else kwargs.get("device")
    if type(given) is int and len(args) + len(kwargs) == 1:
        if given < 0:
            raise RuntimeError("Device index must not be negative")
        return torch.device("cuda", given)
    return torch.device(*args, **kwargs)


def call(engine: Engine, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function of PyTorch with its keywords made fit for C++."""
    if not kwargs:
        return func(*args)
    device = kwargs.get("device")
    pinned = kwargs.get("pin_memory")
    if device is None and not pinned:
        return func(*args, **kwargs)
    kwargs = dict(kwargs)
    if device is not None:
        device = kwargs["device"] = complete(device)
        if isinstance(device, torch.device) and device.type == "meta":
            return on_meta(engine, func, args, kwargs)
    if pinned:
        kwargs["pin_memory"] = False
    result = func(*args, **kwargs)
    if pinned and isinstance(result, torch.Tensor):
        result.pin_memory()
    return result


def on_meta(engine: Engine, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function whose caller asked for tensors on "meta" and shall get them."""
    engine.explicit_meta += 1
    try:
        return func(*args, **kwargs)
    finally:
        engine.explicit_meta -= 1


def legacy_dtype(name: Any) -> torch.dtype | None:
    """The dtype of ``torch.cuda.FloatTensor`` and the like, given by name or type."""
    text = name if isinstance(name, str) else getattr(name, "__name__", "")
    prefix, _, kind = text.rpartition(".")
    if prefix == "torch.cuda" or isinstance(name, _LegacyType):
        return _LEGACY.get(kind)
    return None


class _LegacyType(type):
    """``torch.cuda.FloatTensor`` and the like: constructor and ``isinstance`` test in one."""

    def __call__(cls, *args: Any) -> Any:
        base = getattr(torch, cls.__name__)
        if args and all(isinstance(each, int) for each in args):
            return torch.empty(args, dtype=_LEGACY[cls.__name__], device=CUDA)
        with CPU:
            return base(*args).to(CUDA)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, DeviceTensor) and instance.dtype is _LEGACY[cls.__name__]


def install(engine: Engine, patches: PatchSet) -> None:
    """Patch the places that take a device and are no functions of tensors."""
    for name in _LEGACY:
        patches.set(torch.cuda, name, _LegacyType(name, (), {}))
    parse = private.PARSE_TO.now

    def parse_to(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = complete(kwargs["device"])
        return parse(*map(complete, args), **kwargs)

    patches.set(*private.PARSE_TO, parse_to)

    def default_device(
        context: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # As DeviceContext itself, which lies below the simulation's mode where the default
        # device was set before or with torch.set_default_device.
        kwargs = kwargs or {}
        if func in private.device_constructors() and kwargs.get("device") is None:
            kwargs["device"] = context.device
        return call(engine, func, args, kwargs)

    patches.set(private.DeviceContext, "__torch_function__", default_device)
    set_type = torch.set_default_tensor_type

    def set_default_tensor_type(kind: Any) -> None:
        dtype = legacy_dtype(kind)
        if dtype is None:
            private.set_default_device(None)
            set_type(kind)
        else:
            torch.set_default_device(CUDA)
            torch.set_default_dtype(dtype)

    patches.set(torch, "set_default_tensor_type", set_default_tensor_type)


class DefaultDevice:
    """Puts back the default device that a script set and left."""

    def __init__(self) -> None:
        self._before = self._context()

    @staticmethod
    def _context() -> Any:
        return private.default_device_context()

    def restore(self) -> None:
        """Undo ``torch.set_default_device`` as far as it names the simulated device."""
        context = self._context()
        if context is not self._before and context is not None:
            private.set_default_device(None if self._before is None else self._before.device)
