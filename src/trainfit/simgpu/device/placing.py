"""On which GPU of a process an operator runs, and copies from one to another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch

from trainfit.simgpu.device.errors import DeviceMismatch
from trainfit.simgpu.device.registry import MIXED_DEVICE
from trainfit.simgpu.device.tensor import GPUS, DeviceTensor, SimulatedTensor, gpu_of
from trainfit.torch_private import operators as private
from trainfit.torch_private.tensors import graph_task_id

aten = torch.ops.aten
#: Operators that copy from a tensor of another device.
_COPIES: Final = {private.to_copy.default, aten.copy_.default}
#: Lists of tensors of several GPUs go their slow path, tensor by tensor.
_OF_LISTS: Final = "aten::_foreach_"
_TO_DEVICE: Final = aten.to.device


class Place(NamedTuple):
    """The GPU that an operator runs on, and the one that it copies from (``None``: it does not, or
    that is the same)."""

    gpu: int
    source: int | None = None


class Placing:
    """Finds the place of an operator by its arguments, as PyTorch's device guards do."""

    def __init__(self) -> None:
        self._latest = 0

    def of(self, func: Any, args: Any, kwargs: dict[str, Any], current: int) -> Place:
        """Where ``func`` runs while ``current`` is the current GPU.

        Raises :class:`DeviceMismatch` for operands of different GPUs.
        """
        found = list(dict.fromkeys(_gpus((args, tuple(kwargs.values())))))
        device = args[1] if func is _TO_DEVICE and len(args) > 1 else kwargs.get("device")
        if isinstance(device, torch.device) and device.type == "cuda":
            gpu = current if device.index is None else device.index
            return Place(gpu, next((each for each in found if each != gpu), None))
        if found:
            self._latest = found[0]
            if len(found) == 1:
                return Place(found[0])
            if func in _COPIES:
                return Place(found[0], found[1])
            if func not in MIXED_DEVICE and not func.name().startswith(_OF_LISTS):
                raise DeviceMismatch(GPUS[found[1]], func, found[0])
            return Place(found[0])
        # Autograd makes a formula's tensors on the GPU of the gradients that it goes through.
        return Place(self._latest if graph_task_id() != -1 else current)


def _gpus(value: Any) -> Iterator[int]:
    """The GPUs of the tensors among arguments, in their order."""
    kind = type(value)
    if kind is SimulatedTensor:
        yield value._life.gpu
    elif kind is tuple or kind is list:
        for each in value:
            yield from _gpus(each)


class _Move(torch.autograd.Function):
    """PyTorch's own gradient of a copy asks C++ for the device, which says "meta" of all GPUs."""

    @staticmethod
    def forward(ctx: Any, tensor: DeviceTensor, device: torch.device) -> torch.Tensor:
        ctx.came_from = GPUS[gpu_of(tensor)]
        return private.to_copy.default(tensor, device=device)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.to(ctx.came_from), None


def moved(tensor: DeviceTensor, device: torch.device) -> torch.Tensor:
    """A copy of ``tensor`` on another GPU, or on the host; its gradient goes back."""
    made: torch.Tensor = _Move.apply(tensor, device)  # type: ignore[no-untyped-call]
    return made
