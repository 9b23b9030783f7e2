"""Whose parameters are these: a module's, an optimizer's, or nobody's?"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch

from trainfit.simgpu.device.user_location import is_library
from trainfit.torch_private.modules import is_ready, parameters_of

_AROUND: Final = re.compile(r"^(?:module\.|_orig_mod\.)+")
#: Below this share of all gradients, some that nobody uses cost next to nothing.
_LEAST: Final = 0.01
#: From this share of all tensors on, those that are never trained are no side of a library's model.
_SIDE: Final = 0.1


def in_modules(tensors: Collection[int]) -> set[int]:
    """The parameters among ``tensors``, given by identity, that a module has which lives."""
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


def own_name(name: str) -> str:
    """What the script's own module calls a parameter or a layer: without the names of what is put
    around it (DistributedDataParallel, torch.compile, AveragedModel)."""
    return _AROUND.sub("", name)


def names_of(model: Any) -> dict[int, str]:
    """The names of parameters, by identity, as the script's own module calls them."""
    return {id(tensor): own_name(name) for name, tensor in model.named_parameters()}


class Gradients(NamedTuple):
    """The gradients of models: the bytes of those that no optimizer uses, by their parameter's
    identity, and of all."""

    unused: Mapping[int, int]
    nbytes: int


def unused_gradients(models: Iterable[Any], used: Collection[int]) -> Gradients:
    """Gradients of parameters that no optimizer has: neither one of those whose tensors are
    ``used``, by identity, nor another that lives. None where the optimizers have nothing of these
    models (but copies), and where it is next to nothing."""
    within = {id(parameter): parameter for model in models for parameter in model.parameters()}
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
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters or any(
        parameter.grad is not None or id(parameter) in used for parameter in parameters
    ):
        return False
    others = optimized()
    return not any(id(parameter) in others for parameter in parameters)


def optimized() -> set[int]:
    """Tensors of all optimizers that live, by identity."""
    return {
        id(tensor)
        for each in gc.get_objects()
        if issubclass(type(each), torch.optim.Optimizer)
        for tensor in tensors_of(each)
    }


def untrained(models: Iterable[Any], looked: Iterable[Any]) -> list[tuple[int, str]]:
    """Tensors of optimizers that were ``looked`` at which need a gradient and never had one (by
    identity, with their shapes): not those that a library's own module has aside of what is trained
    of it, such as a pooler that a model of sentences has no use for, or heads of another loss.

    Who trains with it neither wrote that nor can change it. Parts that the script chose (PyTorch's
    layers, its own classes) are none of these; nor is a module of which nothing is trained, whose
    result may be cut off from the loss; nor are those that are many.
    """
    without = [each for seen in looked for each in seen.without()]
    if not without:
        return without
    had = {key: True for seen in looked for key, has_had in seen.had.items() if has_had}
    had |= dict.fromkeys((key for key, _ in without), False)
    aside: set[int] = set()
    for model in models:
        for part in model.modules():
            if _of_library(part) and any(had.get(id(parameter)) for parameter in part.parameters()):
                aside |= _idle(parameters_of(part).values(), had)
                for child in filter(_of_library, part.children()):
                    if not any(had.get(id(parameter)) for parameter in child.parameters()):
                        aside |= _idle(child.parameters(), had)
    if len(aside) >= _SIDE * len(had):
        return without
    return [each for each in without if each[0] not in aside]


def _idle(tensors: Iterable[Any], had: Mapping[int, bool]) -> set[int]:
    return {id(tensor) for tensor in tensors if had.get(id(tensor)) is False}


def _of_library(part: Any) -> bool:
    """Is the class of a module one of a library that is not PyTorch?"""
    name = type(part).__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    return bool(file) and name.partition(".")[0] != "torch" and is_library(str(file))
