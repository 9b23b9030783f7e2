"""``xformers.ops`` where it is not installed: memory-efficient attention by PyTorch's kernels.

As ``xformers/ops/fmha/dispatch.py`` (0.0.32) chooses them: FlashAttention for halves without a
bias of numbers, CUTLASS's kernel else, which PyTorch has as its memory-efficient attention.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from trainfit.simgpu.device.tensor import current_engine
from trainfit.simgpu.stand_ins.absent import AbsentPackage
from trainfit.simgpu.stand_ins.flash_attention import attend
from trainfit.torch_private import operators as private

_HALVES: Final = (torch.float16, torch.bfloat16)
_LARGEST_HEAD: Final = 256
_AMPERE: Final = (8, 0)
_ALL: Final = (-1, -1)


class AttentionBias:
    """A mask of the pairs of a query and a key that meet."""

    causal = False
    window: tuple[int, int] = _ALL

    def ends(self, device: torch.device) -> tuple[Any, Any] | None:
        """The ends of sequences that lie one after the other (``None``: there is one)."""
        return None


class LowerTriangularMask(AttentionBias):
    """Causal."""

    causal = True

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class LowerTriangularFromBottomRightMask(LowerTriangularMask):
    """Causal, the last query at the last key."""


class LocalAttentionFromBottomRightMask(AttentionBias):
    """Keys within a window."""

    def __init__(self, window_left: int, window_right: int) -> None:
        self.window = window_left, window_right


@dataclasses.dataclass
class BlockDiagonalMask(AttentionBias):
    """Sequences of these lengths, each of which meets itself alone."""

    queries: list[int]
    keys: list[int]

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, **_: Any
    ) -> Any:
        """The mask of sequences of these lengths; keys have the queries' if they have none of their
        own."""
        return cls(list(q_seqlen), list(q_seqlen if kv_seqlen is None else kv_seqlen))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Any]) -> tuple[Any, Any]:
        """The mask of tensors (batch, length, …), and them one after the other."""
        lengths = [tensor.shape[1] for tensor in tensors for _ in range(tensor.shape[0])]
        return cls(lengths, lengths), torch.cat(
            [tensor.flatten(0, 1)[None] for tensor in tensors], 1
        )

    def split(self, tensor: Any) -> list[Any]:
        """Back to a tensor each."""
        return list(tensor.split(self.queries, dim=1))

    def make_causal(self) -> BlockDiagonalCausalMask:
        """The causal form of the mask."""
        return BlockDiagonalCausalMask(self.queries, self.keys)

    def ends(self, device: torch.device) -> tuple[Any, Any]:
        """``cu_seqlens`` of queries and of keys."""
        return _ends(self.queries, device), _ends(self.keys, device)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """A block-diagonal mask that is causal within a sequence."""

    causal = True


def _ends(lengths: Sequence[int], device: torch.device) -> Any:
    sums = [sum(lengths[:place]) for place in range(len(lengths) + 1)]
    return torch.tensor(sums, dtype=torch.int32, device=device)


def memory_efficient_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: Any = None,
) -> Any:
    """Attention of shapes (batch, length, heads, size), or without heads, or with groups before
    them."""
    shape = query.shape
    if query.dim() == 3:
        query, key, value = (each.unsqueeze(2) for each in (query, key, value))
    elif query.dim() == 5:
        query, key, value = (each.flatten(2, 3) for each in (query, key, value))
    if _is_flash(query, key, attn_bias):
        out = _by_flash(query, key, value, attn_bias, p, scale)
    else:
        out = _by_cutlass(query, key, value, attn_bias, p, scale)
    out = out.reshape(*shape[:-1], value.shape[-1])
    return out if output_dtype is None else out.to(output_dtype)


def _is_flash(query: Any, key: Any, bias: Any) -> bool:
    return (
        current_engine().gpu.capability >= _AMPERE
        and query.dtype in _HALVES
        and query.shape[-1] <= _LARGEST_HEAD
        and not isinstance(bias, torch.Tensor)
    )


def _by_flash(query: Any, key: Any, value: Any, bias: Any, dropout: float, scale: Any) -> Any:
    bias = AttentionBias() if bias is None else bias
    ends = bias.ends(query.device)
    if ends is None:
        lengths = query.shape[1], key.shape[1]
        found = attend(query, key, value, None, lengths, dropout, scale, bias.causal, bias.window)
        return found[0]
    longest = max(bias.queries), max(bias.keys)
    q, k, v = (each.flatten(0, 1) for each in (query, key, value))
    return attend(q, k, v, ends, longest, dropout, scale, bias.causal, bias.window)[0]


def _by_cutlass(query: Any, key: Any, value: Any, bias: Any, dropout: float, scale: Any) -> Any:
    """CUTLASS's kernel, with a bias of shape (batch, heads, queries, keys), or a mask as one."""
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    causal = isinstance(bias, AttentionBias) and bias.causal
    if isinstance(bias, torch.Tensor):
        bias = bias.reshape(-1, query.shape[2] if bias.dim() == 4 else 1, *bias.shape[-2:])
        if bias.shape[0] == q.shape[0] * q.shape[1]:
            bias = bias.reshape(*q.shape[:2], *bias.shape[-2:])
        bias = bias.expand(*q.shape[:3], k.shape[2])
    else:
        bias = None
    needs = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    out = private.scaled_dot_product_efficient_attention(
        q, k, v, bias, needs, dropout, causal, scale=scale
    )[0]
    return out.transpose(1, 2)


def unbind(source: Any, dim: int) -> Any:
    """``torch.unbind``, whose backward pass copies nothing where the parts lie together."""
    return source.unbind(dim)


def _parts() -> Mapping[str, Mapping[str, Any]]:
    biases = {
        each.__name__: each
        for each in (
            *(AttentionBias, LowerTriangularMask, LowerTriangularFromBottomRightMask),
            *(LocalAttentionFromBottomRightMask, BlockDiagonalMask, BlockDiagonalCausalMask),
        )
    }
    attention = {"memory_efficient_attention": memory_efficient_attention, **biases}
    operators = dict.fromkeys(
        (
            *("AttentionOp", "MemoryEfficientAttentionFlashAttentionOp"),
            *("MemoryEfficientAttentionCutlassOp", "MemoryEfficientAttentionOp"),
        )
    )
    return {
        "xformers": {},
        "xformers.ops": {**attention, **operators, "unbind": unbind},
        "xformers.ops.fmha": attention,
        "xformers.ops.fmha.attn_bias": biases,
    }


XFORMERS: Final = AbsentPackage("xformers", "0.0.32", _parts)
