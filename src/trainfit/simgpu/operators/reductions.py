"""Sums and means over dimensions: the partial results of blocks that share an output.

Source: ``setReduceConfig`` and ``gpu_reduce_kernel`` of ATen/native/cuda/Reduce.cuh, and how
ATen/TensorIterator.cpp orders and joins dimensions. The sizes are in
:mod:`trainfit.simgpu.allocator.workspaces`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from trainfit.simgpu.allocator.workspaces import VECTOR
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.registry import allocates
from trainfit.simgpu.device.tensor import Spec

aten = torch.ops.aten


@allocates(aten.sum.default, aten.mean.default)
def whole(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    summed(engine, args[0]._spec, range(len(args[0]._spec.size)))


@allocates(aten.sum.dim_IntList, aten.mean.dim)
def over_dimensions(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    spec = args[0]._spec
    dims = args[1] if len(args) > 1 else None
    summed(engine, spec, dims or range(len(spec.size)))


def summed(engine: Engine, spec: Spec, dims: Any) -> None:
    """Take what a sum of ``spec`` over ``dims`` keeps while it runs.

    It is asked for at every batch size, so that a stream of one can be that of another.
    """
    over = {dim % len(spec.size) for dim in dims} if spec.size else set()
    sized = sorted((spec.stride[i], spec.size[i], i in over) for i in range(len(spec.size)))
    reduced = _joined([each[:2] for each in sized if each[2] and each[1] > 1])
    kept = _joined([each[:2] for each in sized if not each[2] and each[1] > 1])
    inputs = max(math.prod(extent for _, extent in reduced), 1)
    within = not kept or (bool(reduced) and reduced[0][0] < kept[0][0])
    vector = 1
    if within and reduced:
        vector = VECTOR if reduced[0][0] == 1 and len(reduced) == 1 else 1
    elif kept and kept[0][0] == 1:
        others = [stride for stride, _ in (*reduced, *kept[1:])]
        vector = math.gcd(VECTOR, spec.offset, kept[0][1], *others)
    itemsize = max(spec.dtype.itemsize, 4)
    limits = (engine.gpu.sm_count, _threads(engine.gpu.capability))
    shape = (spec.numel // inputs, inputs, int(within), vector, itemsize, *limits)
    engine.workspace(("reduction_partials", shape), ("reduction_semaphores", shape))


def _joined(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(stride, extent), fastest first, with those that lie one after the other as one."""
    found: list[tuple[int, int]] = []
    for stride, extent in dims:
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = (found[-1][0], found[-1][1] * extent)
        else:
            found.append((stride, extent))
    return found


def _threads(capability: tuple[int, int]) -> int:
    """Threads of a multiprocessor at most (CUDA C++ programming guide, compute capabilities)."""
    if capability == (7, 5):
        return 1024
    return 1536 if capability in ((8, 6), (8, 7), (8, 9)) or capability[0] == 12 else 2048
