"""Autocast for simulated tensors.

C++'s AutocastCUDA kernels test ``is_cuda()``, which is false for simulated tensors, so
Python kernels take their place for the time of the simulation. The weight cache follows
ATen/autocast_mode.cpp: float32 leaves that require a gradient are cast once and kept until the
outermost autocast region ends. Newer PyTorch records such a cast where gradients are off, too, so
that a later forward pass of the region can use it, and keeps none in inference mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from trainfit.simgpu import constructors
from trainfit.simgpu.operators.autocast_lists import policies
from trainfit.simgpu.operators.rnn import autocast_kernel
from trainfit.torch_private.operators import (
    AUTOCAST_CUDA,
    WithoutKeys,
    is_view,
    registrations,
    schema,
)


class Autocast:
    """The AutocastCUDA kernels of one simulation, with their weight cache."""

    def __init__(self) -> None:
        self._cache: dict[tuple[int, torch.dtype], tuple[Any, torch.Tensor]] = {}
        self._records = _records_always()

    def install(self, library: torch.library.Library) -> None:
        """Register the kernels; they vanish with the library."""
        kernels: dict[str, Callable[[Any], Callable[..., Any]]] = {
            "lower": self._lower,
            "float32": self._float32,
            "set_dtype": self._set_dtype,
            "append_dtype": self._append_dtype,
            "promote": self._promote,
        }
        known = set(registrations("AutocastCUDA"))
        for policy, names in policies().items():
            for name in names:
                if name in known:
                    kernel = kernels[policy](_overload(name))
                    library.impl(name.removeprefix("aten::"), kernel, "AutocastCUDA")
        library.impl("_cudnn_rnn", autocast_kernel(self._cast), "AutocastCUDA")

    def in_float32(self, op: Any, *, cast_back: bool) -> Callable[..., Any]:
        """The kernel of an operator that computes in float32, and may return its first argument's
        dtype."""
        kernel = self._float32(op)
        if not cast_back:
            return kernel

        def returning(*args: Any, **kwargs: Any) -> Any:
            result = kernel(*args, **kwargs)
            if isinstance(result, tuple):
                return tuple(each.to(args[0].dtype) for each in result)
            return result.to(args[0].dtype)

        return returning

    def clear(self) -> None:
        """Drop the cached weights (the outermost autocast region ended)."""
        self._cache.clear()

    # -- policies ------------------------------------------------------------------------

    def _lower(self, op: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            dtype = torch.get_autocast_dtype("cuda")
            with WithoutKeys(AUTOCAST_CUDA):
                return self._called(op, args, kwargs, dtype)

        return kernel

    def _float32(self, op: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with WithoutKeys(AUTOCAST_CUDA):
                return self._called(op, args, kwargs, torch.float32)

        return kernel

    def _set_dtype(self, op: Any) -> Callable[..., Any]:
        names = [argument.name for argument in schema(op).arguments]

        def kernel(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            if given.get("dtype") is None and _eligible(args[0]):
                given["dtype"] = torch.float32
            with WithoutKeys(AUTOCAST_CUDA):
                return _call(op, given)

        return kernel

    def _append_dtype(self, op: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with WithoutKeys(AUTOCAST_CUDA):
                if not _eligible(args[0]):
                    return op(*args, **kwargs)
                kwargs["dtype"] = torch.float32
                return torch.norm(*args, **kwargs)

        return kernel

    def _promote(self, op: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            dtype = _widest(args, torch.get_autocast_dtype("cuda"))
            with WithoutKeys(AUTOCAST_CUDA):
                return self._called(op, args, kwargs, dtype)

        return kernel

    def _called(self, op: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
        """``op`` of cast arguments: the last is cast first, for such is the order in which GCC
        computes a call's arguments."""
        named = {name: self._cast(kwargs[name], dtype) for name in reversed(kwargs)}
        return op(*[self._cast(argument, dtype) for argument in reversed(args)][::-1], **named)

    # -- casts ---------------------------------------------------------------------------

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            return self._cast_tensor(value, dtype)
        if isinstance(value, (list, tuple)):
            return type(value)([self._cast(each, dtype) for each in value])
        if isinstance(value, dict):
            return {name: self._cast(each, dtype) for name, each in value.items()}
        return value

    def _cast_tensor(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not _eligible(tensor) or tensor.dtype is dtype:
            return tensor
        caches = (
            dtype is torch.get_autocast_dtype("cuda")
            and tensor.dtype is torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not is_view(tensor)
            and torch.is_autocast_cache_enabled()
            and not (self._records and torch.is_inference_mode_enabled())
        )
        if not caches:
            return tensor.to(dtype)
        key = (id(tensor), dtype)
        found = self._cache.get(key)
        if found is None:
            with torch.set_grad_enabled(self._records or torch.is_grad_enabled()):
                found = (tensor, tensor.to(dtype))
            self._cache[key] = found
        return found[1]


@functools.cache
def _records_always() -> bool:
    """Does this PyTorch record a cast that it keeps where gradients are off, too?"""
    weight = constructors.ones(1, 1, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            weight @ weight
        return (weight @ weight).requires_grad


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_cuda
        and value.dtype.is_floating_point
        and value.dtype is not torch.float64
    )


def _widest(value: Any, dtype: torch.dtype) -> torch.dtype:
    if isinstance(value, (list, tuple)):
        for each in value:
            dtype = _widest(each, dtype)
        return dtype
    if _eligible(value):
        return torch.float32 if torch.float32 in (dtype, value.dtype) else dtype
    return dtype


def _overload(name: str) -> Any:
    base, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _call(op: Any, given: dict[str, Any]) -> Any:
    """Call with schema names: positional arguments by position, the rest by keyword."""
    args, kwargs = [], {}
    positional = True
    for argument in schema(op).arguments:
        if argument.name not in given:
            positional = False
            continue
        if positional and not argument.kwarg_only:
            args.append(given[argument.name])
        else:
            kwargs[argument.name] = given[argument.name]
    return op(*args, **kwargs)
