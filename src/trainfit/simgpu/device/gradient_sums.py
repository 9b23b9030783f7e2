"""Where a tensor has several gradients, autograd adds the later ones into the first.

Source: ``InputBuffer::accumulate`` of torch/csrc/autograd/input_buffer.cpp. Without a graph of the
backward pass the sum is made in place if nobody else holds the first gradient. It never is for a
tensor of a class of Python's, as simulated tensors are, so that autograd asks for a new tensor
here; the one that it has takes its place.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from trainfit.simgpu import constructors
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.registry import handles
from trainfit.simgpu.device.tensor import CUDA, META, SimulatedTensor
from trainfit.torch_private.operators import make_subclass, no_dispatch, storage_uses, use_count

aten = torch.ops.aten


@handles(aten.add.Tensor)
def add(engine: Engine, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if engine.in_backward() and not kwargs and _may_add_in_place(*args[:2]):
        return engine.generic(engine.info(aten.add_.Tensor), args, kwargs)
    return engine.generic(engine.info(func), args, kwargs)


def _may_add_in_place(first: Any, second: Any) -> bool:
    """``can_accumulate_inplace``, of a sum that autograd makes."""
    return (
        not torch.is_grad_enabled()
        and type(first) is type(second) is SimulatedTensor
        and first.shape == second.shape
        and first.dtype is second.dtype
        and first is not second
        and _is_dense(first)
        and (use_count(first), storage_uses(first._meta)) == held_by_autograd_alone()
    )


def _is_dense(tensor: SimulatedTensor) -> bool:
    """Is every element at a place of its own, without gaps?"""
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent != 1:
            if stride != expected:
                return False
            expected *= extent
    return True


@functools.cache
def held_by_autograd_alone() -> tuple[int, int]:
    """What :func:`use_count` and :func:`storage_uses` say of such a gradient in this PyTorch.

    Found out on a graph of two gradients; to be called first outside of a simulation.
    """
    seen: list[tuple[int, int]] = []

    class Watched(torch.Tensor):
        _meta: torch.Tensor

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is aten.add.Tensor:
                seen.append((use_count(args[0]), storage_uses(args[0]._meta)))
            plain = [argument._meta if type(argument) is cls else argument for argument in args]
            with no_dispatch():
                return watched(func(*plain, **(kwargs or {})))

    def watched(meta: torch.Tensor) -> Any:
        tensor = make_subclass(Watched, meta, False, device_for_backend_keys=CUDA)
        tensor._meta = meta
        return tensor

    source = watched(constructors.empty(2, device=META)).requires_grad_()
    value = source * 2
    gradient = constructors.ones(2, device=META)
    torch.autograd.backward([value * 3, value * 5], [watched(gradient), watched(gradient.clone())])
    return seen[-1]
