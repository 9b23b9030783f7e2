"""Quanto's own tests for the very class ``torch.Tensor``, which on a GPU's tensors would hold."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import torch

from trainfit.simgpu.device.tensor import SimulatedTensor
from trainfit.simgpu.patching import PatchSet

#: Modules of optimum.quanto that ask for ``type(x)``.
_MODULES: Final = (
    "library.qbytes_mm",
    "tensor.activations.qbytes_ops",
    "tensor.qtensor",
    "tensor.weights.awq.qbits",
    "tensor.weights.marlin.int4.qbits",
    "tensor.weights.qbits",
    "tensor.weights.tinygemm.qbits",
)


def install(patches: PatchSet) -> None:
    """Patch its modules when they are imported, if they ever are."""

    def seen(module: ModuleType) -> None:
        patches.set(module, "type", _type)

    for name in _MODULES:
        patches.when_imported(f"optimum.quanto.{name}", seen)


def _type(value: Any) -> type:
    """The class that a value has on a GPU."""
    found = type(value)
    if found is not SimulatedTensor:
        return found
    return torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor
