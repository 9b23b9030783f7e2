"""Device names in scripts, hidden from C++ code.

C++ of a CPU build refuses ``"cuda"`` without an index, a bare ``0``, the legacy tensor
types and pinned memory. Python code that goes through here does not notice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from trainfit.simgpu import constructors
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.host_fills import pin
from trainfit.simgpu.device.tensor import CPU, CUDA, GPUS, DeviceTensor, gpu_number, plain
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


#: What makes sparse tensors of offsets, indices and values.
_COMPRESSED = {
    *(torch.sparse_csr_tensor, torch.sparse_csc_tensor, torch.sparse_compressed_tensor),
    *(torch.sparse_bsr_tensor, torch.sparse_bsc_tensor),
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
        return GPUS[gpu_number(value)]
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
    if func in MADE_OF_DATA:
        return _from_data(engine, func, args, kwargs or {})
    if func in _INDEXED and isinstance(args[0], DeviceTensor):
        args = (args[0], _index_of(args[1], args[0].device), *args[2:])
    if not kwargs:
        return func(*args)
    device = kwargs.get("device")
    pinned = kwargs.get("pin_memory")
    if device is None and not pinned:
        return func(*args, **kwargs)
    kwargs = dict(kwargs)
    if device is not None:
        device = kwargs["device"] = complete(device)
        generator = kwargs.get("generator")
        if device in GPUS and generator is not None and generator.device.type != "cuda":
            # check_generator in ATen/core/Generator.h; C++ would hand on a generator of the CPU.
            found = generator.device.type
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{found}'")
        if func is torch.sparse_coo_tensor and device in GPUS and len(args) > 1:
            del kwargs["device"]  # it is where the values are
            args = (*(torch.as_tensor(argument, device=device) for argument in args[:2]), *args[2:])
        if func in _COMPRESSED and device in GPUS:
            del kwargs["device"]  # likewise; the engine says that there is no such layout
            args = (
                tuple(torch.as_tensor(argument, device=device) for argument in args[:3]) + args[3:]
            )
        if isinstance(device, torch.device) and device.type == "meta":
            return on_meta(engine, func, args, kwargs)
    if pinned:
        kwargs["pin_memory"] = False
    result = func(*args, **kwargs)
    if pinned and isinstance(result, torch.Tensor):
        made_pinned(result)
    return result


def made_pinned(tensor: torch.Tensor) -> None:
    """Note that a tensor's memory was made pinned: nothing is copied into it, as a script's own
    ``pin_memory()`` does, which hooks watch.

    Raises:
        RuntimeError: PyTorch's, if it is on the device.
    """
    if isinstance(tensor, DeviceTensor):
        tensor.pin_memory()
    pin(tensor)


#: Functions that make a tensor of numbers, and where among their arguments those are. In C++ they
#: go where the modes do not see it, but for the thread and the state that a switch was set in.
MADE_OF_DATA = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, torch.Tensor.new_tensor: 1}


def _from_data(engine: Engine, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.tensor`` and the like: made on the host, then copied to the device."""
    at, kwargs = MADE_OF_DATA[func], dict(kwargs)
    given = next((name for name in ("data", "obj") if name in kwargs), None)
    data = kwargs.pop(given) if given else args[at] if len(args) > at else None
    if kwargs.pop("pin_memory", False):
        return _from_data(engine, func, (*args[:at], data), kwargs).pin_memory()
    device = complete(kwargs.get("device"))
    if device is not None:
        kwargs["device"] = device
    if isinstance(device, torch.device) and device.type == "meta":
        return on_meta(engine, func, (*args[:at], data), kwargs)
    on_device = device in GPUS and not isinstance(data, DeviceTensor)
    requires_grad = on_device and kwargs.pop("requires_grad", False)
    if on_device:
        kwargs["device"] = CPU
    known = True
    try:
        made = func(*args[:at], data, **kwargs)
    except RuntimeError:  # a build with CUDA looks for a driver, another has no such function
        read = [leaf for leaf in private.leaves_of(data) if isinstance(leaf, DeviceTensor)]
        if not read:
            raise
        # Numbers of the device among the data are read one by one.
        known = all(engine.values.read(plain(leaf)) is not None for leaf in read)
        data = private.map_leaves(DeviceTensor, _read, data)
        made = func(*args[:at], data, **kwargs)
    if on_device:
        made = made.to(device)
        if not known:
            engine.values.forget(plain(made)._life)
    return made.requires_grad_() if requires_grad else made


#: C++ makes tensors of the numbers in ``x[[2, 0]]`` where the modes do not see it: without values.
_INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


def _index_of(index: Any, device: torch.device) -> Any:
    """An index whose sequences of numbers are tensors on the device, as C++ makes them there."""
    if type(index) is tuple:
        return tuple(_numbers(each, device) for each in index)
    # A list of anything else may stand for a tuple.
    plain_numbers = type(index) is list and all(isinstance(number, int) for number in index)
    return _numbers(index, device) if plain_numbers or type(index) in _ROWS else index


def _numbers(index: Any, device: torch.device) -> Any:
    if type(index) is not list and type(index) is not tuple and type(index) not in _ROWS:
        return index
    if any(isinstance(leaf, DeviceTensor) for leaf in private.leaves_of(index)):
        return index
    dtype = torch.int64 if not len(index) else None
    return constructors.tensor(index, dtype=dtype, device=device)


_ROWS = {range, np.ndarray}


def _read(tensor: DeviceTensor) -> torch.Tensor:
    if tensor.dim():
        return tensor.detach().cpu()
    return constructors.tensor(tensor.item(), dtype=tensor.dtype, device=CPU)


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
        return _legacy(getattr(torch, cls.__name__), _LEGACY[cls.__name__], args)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, DeviceTensor) and instance.dtype is _LEGACY[cls.__name__]


def _legacy(base: Callable[..., Any], dtype: torch.dtype, args: tuple[Any, ...]) -> torch.Tensor:
    """What a legacy constructor makes on the device: of sizes, or of data as ``base`` takes it."""
    if all(isinstance(argument, int | torch.Size) for argument in args):
        sizes = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
        return constructors.empty(sizes, dtype=dtype, device=complete("cuda"))
    if isinstance(args[0], DeviceTensor):
        return args[0].detach()
    if isinstance(args[0], list | tuple):
        return constructors.tensor(args[0], dtype=dtype, device=complete("cuda"))
    with CPU:
        made: torch.Tensor = base(*args)
    return made.to(complete("cuda"), dtype)


def install(engine: Engine, patches: PatchSet) -> None:
    """Patch the places that take a device and are no functions of tensors."""
    for name in _LEGACY:
        patches.set(torch.cuda, name, _LegacyType(name, (), {}))
    parse = private.PARSE_TO.now

    def parse_to(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = complete(kwargs["device"])
        device, *others = parse(*map(complete, args), **kwargs)
        model = args[0] if args else kwargs.get("tensor")
        if isinstance(model, DeviceTensor):  # of which C++ says "meta"
            device = model.device
        return (device, *others)

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
        dtype = engine.default_type = legacy_dtype(kind)
        if dtype is None:
            private.set_default_device(None)
            set_type(kind)
            return
        torch.set_default_device(CUDA)
        torch.set_default_dtype(dtype)
        if "__new__" not in vars(torch.Tensor):
            patches.set(torch.Tensor, "__new__", staticmethod(_constructor(engine)))

    patches.set(torch, "set_default_tensor_type", set_default_tensor_type)


def _constructor(engine: Engine) -> Callable[..., torch.Tensor]:
    """``torch.Tensor(...)``, which follows the default type, though not a default device."""
    new: Any = torch.Tensor.__new__

    def construct_tensor(cls: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        dtype = engine.default_type
        if dtype is None or kwargs:
            return new(cls, *args, **kwargs)  # type: ignore[no-any-return]
        made = _legacy(functools.partial(new, torch.Tensor), dtype, args)
        return made if cls is torch.Tensor else made.as_subclass(cls)

    return construct_tensor


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
