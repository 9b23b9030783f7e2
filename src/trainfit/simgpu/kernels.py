"""What CUDA's kernels allocate besides their results, operator by operator."""

from __future__ import annotations

from typing import Any

import torch

from trainfit.simgpu.engine import Engine, allocates

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)


@allocates(
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.addmv.default,
    aten.mv.default,
    aten.dot.default,
    aten._addmm_activation.default,
)
def matrix_product(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """cuBLAS takes its workspace at the first product on a stream."""
    engine.library_workspace("cublas_handle", (engine.gpu.capability[0],))


@allocates(aten._scaled_dot_product_flash_attention_backward.default)
def flash_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    batch, heads, queries, head_size = args[1]._spec.size
    engine.workspace(("flash_backward", (batch, heads, queries, head_size)))


@allocates(aten._scaled_dot_product_efficient_attention_backward.default)
def efficient_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    query, key, value = args[1], args[2], args[3]
    batch, heads, queries, head_size = query._spec.size
    half = int(query._spec.dtype in _HALVES)
    shape = (batch, heads, queries, key._spec.size[2], head_size, value._spec.size[3], half)
    engine.workspace(("efficient_backward", shape))
