"""Tensors, their classes, storages and files."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import serialization

from trainfit.torch_private.needed import attribute, needed, place

with needed():
    from torch._C import Generator as Generator
    from torch._prims_common import suggest_memory_format as suggest_memory_format
    from torch.storage import _StorageBase

    #: PyTorch's own, whatever hooks the public ones have.
    item: Callable[[torch.Tensor], Any] = torch._C.TensorBase.item
    as_subclass: Callable[..., torch.Tensor] = torch._C.TensorBase.as_subclass
    data: Callable[[torch.Tensor], torch.Tensor] = torch._C.TensorBase.data.__get__  # type: ignore[attr-defined]
    set_data: Callable[..., None] = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]
    make_subclass: Callable[..., Any] = torch.Tensor._make_subclass
    #: ``Tensor.__torch_function__`` of the class that it is given.
    torch_function: Callable[..., Any] = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    #: For ``__torch_function__``: there is none.
    disabled_torch_function: Any = torch._C._disabled_torch_function_impl
    NoTorchFunction: Any = torch._C.DisableTorchFunction
    NoTorchFunctionOfSubclasses: Any = torch._C.DisableTorchFunctionSubclass
    #: A context: inference mode or not.
    InferenceMode: Any = torch._C._InferenceMode
    _no_dispatch: Any = torch._C._disabled_torch_dispatch_impl
    _storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
    _keys: Callable[[torch.Tensor], Any] = torch._C._dispatch_keys
    _AUTOCAST_CUDA: Any = torch._C.DispatchKey.AutocastCUDA
    _KeySet: Any = torch._C.DispatchKeySet
    #: May a tensor's data become another's?
    has_compatible_type: Callable[..., Any] = torch._has_compatible_shallow_copy_type
    #: Swaps what two objects are, for Python; C++ keeps to what it holds.
    swap_tensor_impl: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl

StorageBase = _StorageBase
#: What identifies a storage among all that live.
storage_key: Callable[[Any], int] = attribute(torch.UntypedStorage, "_cdata")
untyped: Callable[[Any], Any] = attribute(torch.TypedStorage, "_untyped_storage")
attribute(torch.Tensor, "_is_view")
is_view: Callable[[torch.Tensor], bool] = operator.methodcaller("_is_view")
attribute(torch.Tensor, "_use_count")
#: How many hold on to a tensor in C++.
use_count: Callable[[torch.Tensor], int] = operator.methodcaller("_use_count")
_version: Callable[[torch.Tensor], int] = attribute(torch.Tensor, "_version")


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 of what inference mode made, of which PyTorch does
    not count it."""
    return 0 if tensor.is_inference() else _version(tensor)


def storage_uses(tensor: torch.Tensor) -> int:
    """How many hold on to a tensor's storage."""
    return _storage_uses(storage_key(tensor.untyped_storage()))


#: A tensor of a class that keeps its data in others: its sizes and its device are only told.
MAKE_WRAPPER = place(torch.Tensor, "_make_wrapper_subclass")
MAKE_SUBCLASS = place(torch.Tensor, "_make_subclass")
COMPATIBLE_TYPE = place(torch, "_has_compatible_shallow_copy_type")
FILE_WRITER = place(torch._C, "PyTorchFileWriter")
PACKAGE_REGISTRY = place(serialization, "_package_registry")
REBUILD_TENSOR = place(torch._utils, "_rebuild_tensor")


#: What tells a parameter of another class than ``Parameter``.
PARAMETER_MARK = "_is_param"


def computes(kind: type) -> bool:
    """Has a class a ``__torch_dispatch__`` of its own?"""
    return kind.__torch_dispatch__ is not _no_dispatch  # type: ignore[attr-defined]


_EXTRA_KEYS = "_extra_dispatch_keys"


def like_on_cuda(options: dict[str, Any]) -> dict[str, Any]:
    """Options of :data:`MAKE_WRAPPER` with which autocast sees a tensor on a GPU, wherever C++
    is told that it is."""
    keys, given = _KeySet(_AUTOCAST_CUDA), options.get(_EXTRA_KEYS)
    return options | {_EXTRA_KEYS: keys if given is None else keys | given}


def is_like_on_cuda(tensor: torch.Tensor) -> bool:
    """Was a tensor made with :func:`like_on_cuda`, or is it on a GPU?"""
    return bool(_keys(tensor).has(_AUTOCAST_CUDA))


def is_parameter(tensor: torch.Tensor) -> bool:
    """Was it made a parameter, whatever its class?"""
    return getattr(tensor, PARAMETER_MARK, False)


def untyped_of(storage: Any) -> Any:
    """The bytes of a storage, which may be typed."""
    return getattr(storage, "_untyped_storage", storage)


def local_part(tensor: Any) -> Any:
    """The tensor that this process has of a DTensor; another as it is."""
    return getattr(tensor, "_local_tensor", tensor)
