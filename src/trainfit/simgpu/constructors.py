"""PyTorch's constructors for the simulator's own tensors, whatever a script makes of ``torch``'s.

DeepSpeed's ``zero.Init`` replaces those while a model is made, so that all tensors are on the GPU
and of the model's type (deepspeed/runtime/zero/partition_parameters.py): called by their names in
``torch`` they would make other tensors than the simulator asks for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

arange, empty, full = torch.arange, torch.empty, torch.full
ones, tensor, zeros = torch.ones, torch.tensor, torch.zeros

_OWN: Final[dict[str, Callable[..., Any]]] = {
    name: getattr(torch, name)
    for name in ("arange", "empty", "eye", "full", "ones", "randn", "tensor", "zeros")
}


@contextlib.contextmanager
def pytorchs_own() -> Iterator[None]:
    """Make these names ``torch``'s own meanwhile: PyTorch's shape functions call them where on a
    GPU C++ makes the result."""
    replaced = {
        name: present for name, own in _OWN.items() if (present := getattr(torch, name)) is not own
    }
    for name in replaced:
        setattr(torch, name, _OWN[name])
    try:
        yield
    finally:
        for name, present in replaced.items():
            setattr(torch, name, present)
