"""Scratch allocations of the attention kernels, operator by operator."""

from __future__ import annotations

from typing import Any

import torch

from trainfit.simgpu.dispatch.engine import Engine
from trainfit.simgpu.dispatch.registry import allocates
from trainfit.torch_private import operators as private

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)
#: Compute capabilities whose shared memory holds the kernels with 128 x 128 blocks.
_WIDE = ((8, 0), (8, 7))


@allocates(private.scaled_dot_product_flash_attention.default)
def flash_forward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    query, key = args[0]._spec, args[1]._spec
    if len(args) > 3 and args[3]:
        return  # with dropout the keys are never split
    batch, heads, queries, head_size = query.size
    shape = (batch, heads, queries, key.size[2], head_size, engine.gpu.sm_count)
    engine.workspace(("flash_splits", shape))


@allocates(private.scaled_dot_product_flash_attention_backward.default)
def flash_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    query, key = args[1]._spec, args[2]._spec
    batch, heads, queries, head_size = query.size
    processors = engine.gpu.sm_count if torch.are_deterministic_algorithms_enabled() else 0
    others = (key.size[2], key.size[1], query.dtype.itemsize, processors)
    engine.workspace(("flash_backward", (batch, heads, queries, head_size, *others)))


@allocates(private.scaled_dot_product_cudnn_attention_backward.default)
def cudnn_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    engine.workspace(("cudnn_attention_backward", args[1]._spec.size))


@allocates(private.scaled_dot_product_efficient_attention.default)
def efficient_forward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    query, value = args[0]._spec, args[2]._spec
    if query.dtype in _HALVES and value.size[3] > 128:
        batch, heads, queries, _ = query.size
        engine.workspace(("efficient_forward", (batch, heads, queries, value.size[3])))


@allocates(private.scaled_dot_product_efficient_attention_backward.default)
def efficient_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    query, key, value = (each._spec for each in args[1:4])
    batch, heads, queries, head_size = query.size
    capability = engine.gpu.capability
    widest = 128 if capability in _WIDE or capability[0] in (9, 10) else 64
    half = query.dtype in _HALVES
    products = 0
    if not half:
        products = 1
    elif capability == (7, 0) and max(head_size, value.size[3]) > widest:
        products = 3
    if products:
        engine.workspace(("efficient_delta", (batch, heads, queries, value.size[3], products)))
    shape = (batch, heads, queries, key.size[2], head_size, value.size[3], int(half), widest)
    engine.workspace(("efficient_backward", shape))
