"""Whose parameters are these: a module's, an optimizer's, or nobody's?"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch

from trainfit.torch_private.modules import is_ready, parameters_of

#: Below this share of all gradients, some that nobody uses cost next to nothing.
_LEAST: Final = 0.01


def in_modules(tensors: Collection[int]) -> set[int]:
    """Those parameters, given by identity, that a module has which lives."""
    return {
        id(parameter)
        for each in gc.get_objects()
        if issubclass(type(each), torch.nn.Module) and is_ready(each)
        for parameter in parameters_of(each).values()
        if id(parameter) in tensors
    }


def tensors_of(optimizer: Any) -> list[Any]:
    return [
        tensor
        for group in optimizer.param_groups
        for tensor in group["params"]
        if isinstance(tensor, torch.Tensor)
    ]


class Gradients(NamedTuple):
    """Of models: the bytes of those that no optimizer uses, by their parameter's identity, and of
    all."""

    unused: Mapping[int, int]
    nbytes: int


def unused_gradients(models: Iterable[Any], used: Collection[int]) -> Gradients:
    """Gradients of parameters that no optimizer has: neither one of those whose tensors are
    ``used``, by identity, nor another that lives. None where the optimizers have nothing of these
    models (but copies), and where it is next to nothing."""
    within = {id(each): each for model in models for each in model.parameters()}
    sizes = {
        key: each.grad.nbytes
        for key, each in within.items()
        if each.requires_grad and each.grad is not None and not each.grad.is_sparse
    }
    total = sum(sizes.values())
    unused = {key: nbytes for key, nbytes in sizes.items() if key not in used}
    is_little = sum(unused.values()) < _LEAST * total
    if not unused or is_little or not any(key in used for key in within):
        return Gradients({}, total)
    for key in optimized():
        unused.pop(key, None)
    return Gradients(unused, total)


def without_gradients(model: Any, used: Collection[int]) -> bool:
    """Has no parameter of a model a gradient, though some need one, nor an optimizer (``used``, by
    identity, or another that lives)?"""
    parameters = [each for each in model.parameters() if each.requires_grad]
    if not parameters or any(each.grad is not None or id(each) in used for each in parameters):
        return False
    others = optimized()
    return not any(id(each) in others for each in parameters)


def optimized() -> set[int]:
    """Tensors of all optimizers that live, by identity."""
    return {
        id(tensor)
        for each in gc.get_objects()
        if issubclass(type(each), torch.optim.Optimizer)
        for tensor in tensors_of(each)
    }
