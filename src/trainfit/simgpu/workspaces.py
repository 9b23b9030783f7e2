"""Memory that GPU libraries take besides an operator's results.

Each model is a pure function of integers, every one of which is affine in the batch size,
so a recording can be evaluated at another batch size without running the script again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MiB: Final = 1 << 20

MODELS: dict[str, Callable[..., int]] = {}

#: Models of what a closed library chooses by itself: estimates, not facts.
ESTIMATED: Final = frozenset({"cudnn_tensor_core", "cudnn_winograd"})


def _model(function: Callable[..., int]) -> Callable[..., int]:
    MODELS[function.__name__] = function
    return function


def workspace_bytes(model: str, arguments: tuple[int, ...]) -> int:
    """Bytes that ``model`` asks for; 0 means that nothing is allocated."""
    return MODELS[model](*arguments)


@_model
def cublas_handle(capability_major: int) -> int:
    """Workspace of a cuBLAS handle, allocated by PyTorch at the first matrix product.

    ``:4096:2:16:8`` (two of 4 MiB and eight of 16 KiB) before Hopper, 32 MiB on Hopper and
    data-centre Blackwell. Source: getChosenWorkspaceSize in ATen/cuda/CUDABlas.cpp /
    CublasHandlePool.cpp; 8,519,680 bytes are reported in pytorch issue 95668.
    """
    if capability_major in (9, 10):
        return 4096 * 8 * 1024
    return 4096 * 1024 * 2 + 16 * 1024 * 8


@_model
def cudnn_tensor_core(copies: int, input_bytes: int, output_bytes: int) -> int:
    """cuDNN's tensor-core convolution: copies of the tensors of a pass in its workspace.

    One in the NHWC layout that the kernels want (``nchwToNhwcKernel`` and
    ``nhwcToNchwKernel`` in profiles), one more where they are rounded to TF32.
    """
    return copies * (input_bytes + output_bytes)


@_model
def cudnn_winograd(
    samples: int, inputs: int, outputs: int, height: int, width: int, itemsize: int
) -> int:
    """cuDNN's non-fused Winograd convolution, F(4x4, 3x3), for float32 3x3 at stride 1.

    Each 4x4 tile of the result (``height`` x ``width``) becomes 6x6 numbers for every input
    and every output channel, and each 3x3 filter 6x6; all three are held at once
    (Lavin and Gray, arXiv 1509.09308, section 4; CUDNN_CONVOLUTION_*_ALGO_WINOGRAD_NONFUSED).
    """
    tiles = -(-height // 4) * -(-width // 4)
    return 36 * itemsize * (samples * tiles * (inputs + outputs) + inputs * outputs)


@_model
def contiguous_copy(nbytes: int) -> int:
    """A copy that a kernel makes because it wants another memory layout."""
    return nbytes


@_model
def flash_backward(batch: int, heads: int, queries: int, head_size: int) -> int:
    """Flash attention's backward: float32 accumulator of dQ, and softmax sums.

    Rows are rounded up to 128, the head size to 32. Source: mha_bwd in
    ATen/native/transformers/cuda/flash_attn/flash_api.cpp (dq_accum and softmax_d).
    """
    rows = _round_up(queries, 128)
    return batch * heads * rows * (_round_up(head_size, 32) + 1) * 4


@_model
def efficient_backward(
    batch: int, heads: int, queries: int, keys: int, head_size: int, value_size: int, half: int
) -> int:
    """Memory-efficient attention's backward: delta, and float32 accumulators for halves.

    Source: _efficient_attention_backward in ATen/native/transformers/cuda/attention_backward.cu
    (delta; workspace of the kernel, which accumulates dQ — and dK, dV when the head is wider
    than its registers, 64 — in float32 where the result is of half precision).
    """
    delta = batch * heads * _round_up(queries, 32) * 4
    if not half:
        return delta
    accumulators = _round_up(queries, 64) * head_size
    if head_size > 64:
        accumulators += _round_up(keys, 64) * (head_size + value_size)
    return delta + batch * heads * accumulators * 4


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
