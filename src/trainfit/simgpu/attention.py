"""Scaled dot product attention by the backend that this GPU would take.

The rules are those of ATen/native/transformers/cuda/sdp_utils.cpp (which filter a backend
has) and of scaled_dot_product_attention in ATen/native/transformers/attention.cpp (what is
padded, expanded and converted on the way).
"""

from __future__ import annotations

import math

import torch
from torch.torch_version import TorchVersion

from trainfit.hardware import GpuSpec
from trainfit.simgpu.tensor import SimulatedTensor

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)
#: Since this version PyTorch tries cuDNN's attention first on Hopper and B200/B300 (with
#: the cuDNN >= 9.15.1 that its CUDA 13 wheels bring).
_CUDNN_FIRST = (2, 11)


def attention(
    gpu: GpuSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` on ``gpu``; shapes (batch, heads, tokens, size)."""
    backend = choose_backend(gpu, query, key, value, mask, causal, enable_gqa)
    if backend == "math":
        return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
            query, key, value, mask, dropout, causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    if backend == "flash":
        return _flash(query, key, value, dropout, causal, scale)
    needs_sums = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, -math.inf).to(query.dtype)
    if backend == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(  # type: ignore[no-any-return]
            query, key, value, mask, needs_sums, dropout, causal, False, scale=scale
        )[0]
    if mask is not None:
        mask = _aligned_mask(mask, query, key)
    return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        query, key, value, mask, needs_sums, dropout, causal, scale=scale
    )[0]


def choose_backend(
    gpu: GpuSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    gqa: bool,
) -> str:
    """``"flash"``, ``"efficient"``, ``"cudnn"`` or ``"math"``."""
    tensors = (query, key, value)
    if query.dim() != 4 or any(type(t) is not SimulatedTensor for t in tensors):
        return "math"
    usable = {
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled()
        and gpu.capability[0] in (9, 10)
        and TorchVersion(torch.__version__) >= _CUDNN_FIRST  # type: ignore[operator]
        and _fits_flash(gpu, query, key, value, 128),
        "flash": torch.backends.cuda.flash_sdp_enabled()
        and mask is None
        and not (causal and query.shape[-2] != key.shape[-2])
        and _fits_flash(gpu, query, key, value, 256),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled()
        and not gqa
        and _fits_efficient(gpu, query, key, value, mask),
    }
    chosen = next((name for name, fits in usable.items() if fits), "math")
    if chosen == "math" and not torch.backends.cuda.math_sdp_enabled():
        raise RuntimeError("No available kernel. Aborting execution.")
    return chosen


def _common(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """What every fused backend asks of its operands."""
    tensors = (query, key, value)
    return (
        len({t.dtype for t in tensors}) == 1
        and all(t.shape[-2] > 0 and t.stride(-1) == 1 for t in tensors)
        and query.shape[0] == key.shape[0] == value.shape[0]
    )


def _fits_flash(
    gpu: GpuSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, widest: int
) -> bool:
    return (
        gpu.capability >= (8, 0)
        and query.dtype in _HALVES
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= widest
        and _common(query, key, value)
    )


def _fits_efficient(
    gpu: GpuSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
) -> bool:
    modern = gpu.capability >= (8, 0)
    dtypes = (torch.float32, *_HALVES) if modern else (torch.float32, torch.float16)
    alignment = _gemm_alignment(gpu, query.dtype)
    return (
        query.dtype in dtypes
        and query.shape[1] == key.shape[1] == value.shape[1]
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % alignment == 0
        and value.shape[-1] % alignment == 0
        and (mask is None or mask.dtype in (torch.bool, query.dtype))
        and _common(query, key, value)
    )


def _gemm_alignment(gpu: GpuSpec, dtype: torch.dtype) -> int:
    """Elements that CUTLASS wants the head size to be a multiple of."""
    half = dtype in _HALVES
    least = 4 if gpu.capability >= (8, 0) else 1
    if gpu.capability >= (8, 0) or (gpu.capability >= (7, 0) and half):
        least = max(least, 8 if half else 4)
    return least


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Heads are padded to a multiple of 8 and cut again."""
    size = query.shape[-1]
    scale = 1.0 / math.sqrt(size) if scale is None else scale
    missing = -size % 8
    if missing:
        query, key, value = (torch.nn.functional.pad(t, (0, missing)) for t in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, causal, False, scale=scale
    )[0]
    return out[..., :size] if missing else out  # type: ignore[no-any-return]


def _aligned_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Rows padded to a multiple of 8 elements, then a view of the wanted shape."""
    missing = -mask.shape[-1] % 8
    if missing:
        mask = torch.nn.functional.pad(mask, (0, missing))[..., : mask.shape[-1]]
    batch, heads, rows, _ = query.shape
    return mask.expand(batch, heads, rows, key.shape[-2])
