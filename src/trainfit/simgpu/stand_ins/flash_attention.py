"""``flash_attn`` where it is not installed: its functions, by the kernels that PyTorch has of it.

PyTorch's ``_flash_attention_forward`` and ``_backward`` are FlashAttention 2: they save for the
backward pass what ``flash_attn/flash_attn_interface.py`` (2.8) saves, and take the same scratch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from trainfit.simgpu.device.tensor import DeviceTensor, current_engine
from trainfit.simgpu.stand_ins.absent import AbsentPackage
from trainfit.torch_private import operators as private

_HALVES: Final = (torch.float16, torch.bfloat16)
_LARGEST_HEAD: Final = 256
_AMPERE: Final = (8, 0)
_Window = tuple[int, int]
_ALL: Final[_Window] = (-1, -1)


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _Window = _ALL,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of shapes (batch, length, heads, size); keys may have fewer heads, which are
    shared."""
    lengths = q.shape[1], k.shape[1]
    out = attend(q, k, v, None, lengths, dropout_p, softmax_scale, causal, window_size)
    return out if return_attn_probs else out[0]


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _Window = _ALL,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """Attention of sequences one after the other, of shapes (total, heads, size)."""
    ends, lengths = (cu_seqlens_q, cu_seqlens_k), (int(max_seqlen_q), int(max_seqlen_k))
    out = attend(q, k, v, ends, lengths, dropout_p, softmax_scale, causal, window_size)
    return out if return_attn_probs else out[0]


def flash_attn_qkvpacked_func(qkv: Any, *args: Any, **kwargs: Any) -> Any:
    """Attention of one tensor of shape (batch, length, 3, heads, size)."""
    return flash_attn_func(*qkv.unbind(2), *args, **kwargs)


def flash_attn_kvpacked_func(q: Any, kv: Any, *args: Any, **kwargs: Any) -> Any:
    """Keys and values of shape (batch, length, 2, heads, size)."""
    return flash_attn_func(q, *kv.unbind(2), *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Any, cu_seqlens: Any, max_seqlen: Any, *args: Any, **kwargs: Any
) -> Any:
    """Attention of one tensor of shape (total, 3, heads, size)."""
    q, k, v = qkv.unbind(1)
    ends, length = cu_seqlens, max_seqlen
    return flash_attn_varlen_func(q, k, v, ends, ends, length, length, *args, **kwargs)


def flash_attn_varlen_kvpacked_func(q: Any, kv: Any, *args: Any, **kwargs: Any) -> Any:
    """Keys and values of shape (total, 2, heads, size)."""
    return flash_attn_varlen_func(q, *kv.unbind(1), *args, **kwargs)


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _Window = _ALL,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention against a cache of shape (batch, length, heads, size), all of which counts as
    filled."""
    if block_table is not None:
        raise NotImplementedError("flash_attn's stand-in has no paged cache (block_table)")
    with torch.no_grad():
        if k is not None:
            k_cache[:, : k.shape[1]].copy_(k)
            v_cache[:, : v.shape[1]].copy_(v)
        lengths = q.shape[1], k_cache.shape[1]
        out = attend(q, k_cache, v_cache, None, lengths, 0.0, softmax_scale, causal, window_size)
    return out[:2] if return_softmax_lse else out[0]


def attend(
    q: Any,
    k: Any,
    v: Any,
    ends: tuple[Any, Any] | None,
    lengths: tuple[int, int],
    dropout: float,
    scale: float | None,
    causal: bool,
    window: _Window,
) -> tuple[Any, Any, None]:
    """Result, log-sum-exp and no probabilities; ``ends`` of sequences that lie one after the other
    (``cu_seqlens``). Heads are padded to a multiple of 8 and cut again."""
    _check(q, k, v)
    size = q.shape[-1]
    scale = size**-0.5 if scale is None else scale
    if missing := -size % 8:
        q, k, v = (torch.nn.functional.pad(each, (0, missing)) for each in (q, k, v))
    q, k, v = (each if each.stride(-1) == 1 else each.contiguous() for each in (q, k, v))
    options: dict[str, Any] = {"scale": scale}
    if tuple(window) != _ALL:
        options |= {"window_size_left": window[0], "window_size_right": window[1]}
    out, sums = private.flash_attention_forward(
        *(q, k, v), *(ends or (None, None)), *lengths, dropout, causal, False, **options
    )[:2]
    return (out[..., :size] if missing else out), sums, None


def _check(q: Any, k: Any, v: Any) -> None:
    """What ``mha_fwd`` (csrc/flash_attn/flash_api.cpp) refuses."""
    gpu = current_engine().gpu
    if not all(isinstance(tensor, DeviceTensor) for tensor in (q, k, v)):
        raise NotImplementedError("flash_attn has kernels for CUDA tensors only: move q, k and v")
    if gpu.capability < _AMPERE:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if q.dtype not in _HALVES:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError("query, key and value must have the same dtype")
    if q.shape[-1] > _LARGEST_HEAD:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    if q.shape[-2] % k.shape[-2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")


# --- flash_attn.bert_padding ----------------------------------------------------------------------


def unpad_input(hidden_states: Any, attention_mask: Any, unused_mask: Any = None) -> Any:
    """Rows of ``hidden_states`` (batch, length, …) that the mask keeps, their indices, the ends of
    sequences, the longest, and how many each has."""
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    rows = kept.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(kept.flatten(), as_tuple=False).flatten()
    longest = kept.shape[-1]
    rows.max().item()  # which the host waits for; data tells it
    ends = torch.nn.functional.pad(torch.cumsum(rows, dim=0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, ends, longest, used


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """Back to (batch, length, …)."""
    whole = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return whole.unflatten(0, (batch, seqlen))


def index_first_axis(source: Any, indices: Any) -> Any:
    """Rows of ``source``."""
    return source[indices]


def index_put_first_axis(values: Any, indices: Any, rows: int) -> Any:
    """``rows`` rows, of zeros where there are no ``values``."""
    whole = torch.zeros(rows, *values.shape[1:], device=values.device, dtype=values.dtype)
    return whole.index_put((indices,), values)


# --- flash_attn.layers.rotary ---------------------------------------------------------------------


def apply_rotary_emb(
    x: Any, cos: Any, sin: Any, interleaved: bool = False, inplace: bool = False, **_: Any
) -> Any:
    """A rotary embedding of shape (batch, length, heads, size), by one kernel that saves ``cos``
    and ``sin``."""
    return _Rotary.apply(x, cos, sin, inplace)  # type: ignore[no-untyped-call]


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, cos: Any, sin: Any, inplace: bool) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.inplace = inplace
        if inplace:
            ctx.mark_dirty(x)
        return x.mul_(1.0) if inplace else x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        turned = gradient.mul_(1.0) if ctx.inplace else gradient * 1.0
        return turned, None, None, None


def _parts() -> Mapping[str, Mapping[str, Any]]:
    functions = {
        each.__name__: each
        for each in (
            *(flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache),
            *(flash_attn_qkvpacked_func, flash_attn_kvpacked_func),
            *(flash_attn_varlen_qkvpacked_func, flash_attn_varlen_kvpacked_func),
        )
    }
    padding = {
        each.__name__: each
        for each in (unpad_input, pad_input, index_first_axis, index_put_first_axis)
    }
    rotary = {"apply_rotary_emb": apply_rotary_emb}
    return {
        "flash_attn": functions,
        "flash_attn.flash_attn_interface": functions,
        "flash_attn.bert_padding": padding,
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": rotary,
        "flash_attn.ops": {},
        "flash_attn.ops.triton": {},
        "flash_attn.ops.triton.rotary": {"apply_rotary": apply_rotary_emb},
    }


FLASH_ATTN: Final = AbsentPackage("flash-attn", "2.8.3", _parts)
