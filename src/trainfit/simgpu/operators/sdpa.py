"""Scaled dot-product attention with the backend that this GPU would use.

The rules are those of ATen/native/transformers/cuda/sdp_utils.cpp (which filter a backend
has) and of scaled_dot_product_attention in ATen/native/transformers/attention.cpp (what is
padded, expanded and converted on the way).
"""

from __future__ import annotations

import math
import os

import torch
from torch.torch_version import TorchVersion

from trainfit.hardware import GpuSpec
from trainfit.results.text import dtype_name
from trainfit.simgpu.device.tensor import DeviceTensor
from trainfit.torch_private import operators as private
from trainfit.torch_private.operators import local_part

_HALVES = (torch.float16, torch.bfloat16)
#: Since this version PyTorch tries cuDNN's attention first on Hopper and B200/B300 (with
#: the cuDNN >= 9.15.1 that its CUDA 13 wheels bring).
_CUDNN_FIRST = (2, 11)
#: at::SDPBackend by its number, and the order that Context.h begins with.
_BACKENDS = ("math", "flash", "efficient", "cudnn", "overrideable")
_FIRST_ORDER = [1, 2, 0, 3, 4]

#: Types as C++ names them there.
_NAMES = {
    "int64": "long int",
    "int32": "int",
    "uint8": "unsigned char",
    "float32": "float",
    "float64": "double",
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
}


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
    """``F.scaled_dot_product_attention`` on ``gpu``; shapes (batch, heads, tokens, size).

    Raises what PyTorch's own check raises of a mask of whole numbers
    (aten/src/ATen/native/transformers/attention.cpp, validate_sdpa_input).
    """
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        given, wanted = (dtype_name(each.dtype) for each in (mask, query))
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
            f"attn_mask.dtype: {_NAMES.get(given, given)} and  query.dtype: "
            f"{_NAMES.get(wanted, wanted)} instead."
        )
    backend = choose_backend(gpu, query, key, value, mask, causal, enable_gqa, dropout)
    if backend == "math":
        return private.scaled_dot_product_attention_math(  # type: ignore[no-any-return]
            query, key, value, mask, dropout, causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    if backend == "flash":
        return _flash(query, key, value, dropout, causal, scale)
    needs_sums = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, -math.inf).to(query.dtype)
    if backend == "cudnn":
        return private.scaled_dot_product_cudnn_attention(  # type: ignore[no-any-return]
            query, key, value, mask, needs_sums, dropout, causal, False, scale=scale
        )[0]
    if mask is not None:
        mask = _aligned_mask(mask, query, key)
    return private.scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
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
    dropout: float,
) -> str:
    """``"flash"``, ``"efficient"``, ``"cudnn"`` or ``"math"``: select_sdp_backend.

    Raises ``RuntimeError`` where the script allows none of those that are possible.
    """
    tensors = (query, key, value)
    if len({t.dtype for t in tensors}) > 1:  # validate_sdpa_input
        names = [dtype_name(t.dtype) for t in tensors]
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{names[0]} key.dtype: {names[1]} and value.dtype: {names[2]} instead."
        )
    if query.dim() != 4 or any(not isinstance(local_part(t), DeviceTensor) for t in tensors):
        return "math"
    grouped = len({t.shape[1] for t in tensors}) > 1
    if grouped and not (
        gqa and query.shape[1] % key.shape[1] == 0 == key.shape[1] - value.shape[1]
    ):
        return "math"
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    for name in _order(gpu):
        if name == "cudnn":
            fits = torch.backends.cuda.cudnn_sdp_enabled() and _fits_cudnn(
                gpu, query, key, value, dropout
            )
        elif name == "flash":
            fits = (
                torch.backends.cuda.flash_sdp_enabled()
                and mask is None
                and not (causal and query.shape[-2] != key.shape[-2])
                and _fits_flash(gpu, query, key, value)
                and not (trains and _lacks_backward(gpu, query.shape[-1], dropout))
            )
        elif name == "efficient":
            fits = torch.backends.cuda.mem_efficient_sdp_enabled() and _fits_efficient(
                gpu, query, key, value, mask
            )
        else:
            fits = name == "math" and torch.backends.cuda.math_sdp_enabled()
        if fits:
            return name
    raise RuntimeError("No available kernel. Aborting execution.")


def _order(gpu: GpuSpec) -> list[str]:
    """priority_order: cuDNN first on Hopper and B200/B300, unless the script says otherwise."""
    order = private.attention_order()
    first = (
        gpu.capability[0] in (9, 10)
        and TorchVersion(torch.__version__) >= _CUDNN_FIRST  # type: ignore[operator]
        and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    )
    if first and list(order) == _FIRST_ORDER:
        return ["cudnn", "flash", "efficient", "math"]
    return [_BACKENDS[number] for number in order if 0 <= number < len(_BACKENDS)]


def _lacks_backward(gpu: GpuSpec, head_size: int, dropout: float) -> bool:
    """check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120."""
    small = (8, 6) <= gpu.capability <= (8, 9) or gpu.capability[0] == 12
    return small and head_size > 192 and (head_size <= 224 or dropout > 0)


def _common(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """What every fused backend asks of its operands."""
    tensors = (query, key, value)
    return (
        len({t.dtype for t in tensors}) == 1
        and all(t.shape[-2] > 0 and t.stride(-1) == 1 for t in tensors)
        and query.shape[0] == key.shape[0] == value.shape[0]
    )


def _fits_flash(gpu: GpuSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        gpu.capability >= (8, 0)
        and query.dtype in _HALVES
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
        and _common(query, key, value)
    )


def _fits_cudnn(
    gpu: GpuSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float
) -> bool:
    """can_use_cudnn_attention, for the cuDNN that torch 2.13's wheels bring."""
    wide, value_wide = query.shape[-1], value.shape[-1]
    data_centre = gpu.capability == (9, 0) or gpu.capability[0] == 10
    return (
        gpu.capability >= (8, 0)
        and query.dtype in _HALVES
        and wide == key.shape[-1]
        and wide % 8 == value_wide % 8 == 0
        and (max(wide, value_wide) <= 128 or (data_centre and (wide, value_wide) == (192, 128)))
        and key.shape[-2] != 1
        and not (dropout > 0 and query.shape[-2] == 1)
        and dropout * 16 == math.floor(dropout * 16)
        and not (
            torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
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
        # Grouped queries: not before PyTorch pull request 191085.
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
    out = private.scaled_dot_product_flash_attention(
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
