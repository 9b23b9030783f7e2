"""Memory formats of convolutions' results.

Shape functions of plain meta tensors leave them contiguous, for they do not know the device.
On CUDA they follow input and weight: cudnn_conv_suggest_memory_format in
ATen/native/ConvUtils.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from trainfit.simgpu.tensors.tensor import SimulatedTensor, Spec
from trainfit.torch_private.tensors import suggest_memory_format

aten = torch.ops.aten

CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)
#: Workspaces that are copies of operands, and the kinds of kernels that make them.
COPIES: Final = {"contiguous_copy": "pointwise", "reordered_copy": "pointwise_reordered"}


def convolution_format(source: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """The format that cuDNN computes in and gives its result."""
    if torch.float64 not in (source.dtype, weight.dtype):
        for tensor in (source, weight):
            found = suggest_memory_format(tensor)
            if found in CHANNELS_LAST:
                return found
    return torch.contiguous_format


def innermost(spec: Spec) -> int | None:
    """The dimension of neighbours in memory, counted from the last; ``None``: there is none."""
    found = [
        place - len(spec.size)
        for place, (size, step) in enumerate(zip(spec.size, spec.stride, strict=True))
        if step == 1 and size > 1
    ]
    return found[-1] if found else None


def dense_copy(
    tensor: SimulatedTensor, wanted: torch.memory_format = torch.contiguous_format
) -> tuple[str, tuple[int, ...]]:
    """The workspace (model, arguments) of a copy in that format, by the order that it had."""
    neighbours = 1 - tensor.dim() if wanted in CHANNELS_LAST else -1
    same = innermost(tensor._spec) in (None, neighbours)
    return "contiguous_copy" if same else "reordered_copy", (tensor._spec.nbytes,)


def _of_forward(args: Any, result: Any) -> Any:
    return _laid_out(result, convolution_format(args[0], args[1]))


def _of_backward(args: Any, result: Any) -> Any:
    wanted = convolution_format(args[1], args[2])
    return type(result)([*(_laid_out(each, wanted) for each in result[:2]), result[2]])


def _laid_out(meta: torch.Tensor | None, wanted: torch.memory_format) -> torch.Tensor | None:
    if meta is None:
        return None
    return torch.empty(meta.shape, dtype=meta.dtype, device="meta", memory_format=wanted)


#: By operator: from meta arguments and the fake kernel's result to CUDA's result.
LAYOUTS: dict[Any, Callable[[Any, Any], Any]] = {
    aten.convolution.default: _of_forward,
    aten.convolution_backward.default: _of_backward,
}
