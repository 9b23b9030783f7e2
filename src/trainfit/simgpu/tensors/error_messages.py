"""Error messages of invalid calls: those of PyTorch's kernels, not of its fake kernels.

Shape functions in Python check the same things in other words, and a few things (operands of
two dtypes) not at all. People search for the words they know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainfit.simgpu.tensors.tensor import SimulatedTensor
from trainfit.torch_private.dispatching import no_dispatch

aten = torch.ops.aten

#: Elements of all operands together up to which a failed call is repeated on the CPU.
_MAX_ELEMENTS = 1 << 26
_CPP_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}


def kernels_words(func: Any, args: Any, kwargs: Any, error: Exception) -> Exception:
    """The exception that the CPU's kernel raises for such operands, else ``error``."""
    count = sum(tensor.numel() for tensor in _tensors(args) + _tensors(list(kwargs.values())))
    if count > _MAX_ELEMENTS:
        return error
    try:
        with no_dispatch():
            func(*_on_host(args), **{n: _on_host(v) for n, v in kwargs.items() if n != "device"})
    except (RuntimeError, IndexError, ValueError) as other:
        if "not implemented for" not in str(other):
            return other
    return error


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype, device="cpu")
    if isinstance(value, (list, tuple)):
        return type(value)([_on_host(each) for each in value])
    return value


# -- operands that fake kernels do not check --------------------------------------------

CHECKS: dict[Any, Callable[[Any, Any], None]] = {}


def _product(first: int) -> Callable[[Any, Any], None]:
    def check(args: Any, _: Any) -> None:
        one, two = args[first], args[first + 1]
        if one.dtype is not two.dtype:
            names = [_CPP_NAMES.get(each.dtype, str(each.dtype)) for each in (one, two)]
            raise RuntimeError(
                f"expected mat1 and mat2 to have the same dtype, but got: {names[0]} != {names[1]}"
            )

    return check


for _func in (aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default):
    CHECKS[_func] = _product(0)
for _func in (aten.addmm.default, aten.baddbmm.default, aten.addmv.default):
    CHECKS[_func] = _product(1)


def _convolution(args: Any, _: Any) -> None:
    source, weight, bias = args[0], args[1], args[2]
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype is not source.dtype:
            kinds = [each.type() for each in (source, tensor)]
            raise RuntimeError(
                f"Input type ({kinds[0]}) and {name} type ({kinds[1]}) should be the same"
            )


CHECKS[aten.convolution.default] = _convolution


def _filled(at: int) -> Callable[[Any, Any], None]:
    """A number that the dtype cannot hold: -1e9 in float16, whose largest is 65504."""

    def check(args: Any, kwargs: Any) -> None:
        dtype = kwargs.get("dtype") or getattr(args[0], "dtype", None)
        if dtype is not None and isinstance(args[at], (int, float)):
            with no_dispatch():
                torch.full((2,), args[at], dtype=dtype, device="cpu")  # one element is not checked

    return check


for _at, _fills in (
    (1, (aten.fill.Scalar, aten.fill_.Scalar, aten.full.default, aten.full_like.default)),
    (2, (aten.masked_fill.Scalar, aten.masked_fill_.Scalar, aten.new_full.default)),
):
    CHECKS.update(dict.fromkeys(_fills, _filled(_at)))


def indexed_on_host(indices: Any) -> RuntimeError:
    """A host tensor was indexed with tensors of the device."""
    assert any(type(each) is SimulatedTensor for each in indices)
    return RuntimeError(
        "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
    )
