"""Arguments of operators: as a key, on "meta", and without the classes of the user."""

from __future__ import annotations

from typing import Any

import torch

from trainfit.simgpu.dispatch.registry import MIXED_DEVICE, OperatorInfo
from trainfit.simgpu.tensors.device import META
from trainfit.simgpu.tensors.errors import DeviceMismatch
from trainfit.simgpu.tensors.tensor import DeviceTensor, SimulatedTensor, plain
from trainfit.torch_private.tensors import Generator

_empty_strided = torch.empty_strided
#: The class in C++; ``torch.Generator`` is another while a simulation runs.


def geometry_key(info: OperatorInfo, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What the geometry of an operator's results follows from, as a key of a dictionary."""
    key: list[Any] = [info.func]
    for value in args:
        if type(value) is SimulatedTensor:
            key.append(value._spec)
        else:
            _extend_key(key, value, info)
    for name, value in kwargs.items():
        key.append(name)
        _extend_key(key, value, info)
    return tuple(key)


def _extend_key(key: list[Any], value: Any, info: OperatorInfo) -> None:
    kind = type(value)
    if kind is SimulatedTensor:
        key.append(value._spec)
    elif kind is int or kind is float or kind is bool:
        key.append((kind, value))
    elif kind is list or kind is tuple:
        key.append(len(value))
        for each in value:
            _extend_key(key, each, info)
    elif isinstance(value, torch.Tensor):
        _check_device(value, info)
        key.append(("host", value.shape, value.stride(), value.dtype))
    elif not isinstance(value, Generator):
        key.append(value)


def _check_device(tensor: torch.Tensor, info: OperatorInfo) -> None:
    device = tensor.device
    if device.type == "meta" or tensor.dim() == 0 or info.func in MIXED_DEVICE:
        return
    raise DeviceMismatch(device, info.func)


def meta_arguments(value: Any) -> Any:
    """Arguments with meta tensors in place of simulated and host ones."""
    kind = type(value)
    if kind is SimulatedTensor:
        return value._meta
    if isinstance(value, Generator):
        return None
    if kind is tuple or kind is list:
        return kind([meta_arguments(each) for each in value])
    if isinstance(value, torch.Tensor) and value.device.type != "meta":
        return _empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    return value


def meta_keywords(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords likewise; whatever has a device is on "meta"."""
    found = {}
    for name, value in kwargs.items():
        if name == "device" and value is not None:
            value = META
        elif name == "pin_memory" or isinstance(value, Generator):
            value = None
        found[name] = meta_arguments(value)
    return found


def without_subclasses(value: Any, given: dict[int, Any]) -> Any:
    """Arguments as the engine knows them; notes in ``given`` whose stand-in is which."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([without_subclasses(each, given) for each in value])
    if kind is SimulatedTensor or not isinstance(value, DeviceTensor):
        return value
    stand_in = plain(value)
    given[id(stand_in)] = value
    return stand_in


def with_subclasses(value: Any, given: dict[int, Any]) -> Any:
    """Results; an argument that an operator wrote to and returns is the user's object."""
    if type(value) is list or type(value) is tuple:
        return type(value)([with_subclasses(each, given) for each in value])
    return given.get(id(value), value)
