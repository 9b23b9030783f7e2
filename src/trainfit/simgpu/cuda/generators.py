"""Random number generators of the simulated device.

No random number is ever drawn on it, so a generator is a seed and a state of the size that
CUDA's has. It is a CPU generator underneath: PyTorch's argument parser takes no other class.
"""

from __future__ import annotations

from typing import Any

import torch

from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.tensors.device import CPU, CUDA, check_ordinal
from trainfit.torch_private.tensors import Generator as PlainGenerator

_STATE = 2  # 64-bit words: seed and offset, as CUDAGeneratorImpl::get_state writes them


class SimulatedGenerator(PlainGenerator):
    """``torch.Generator(device="cuda")``."""

    _offset: int

    def __new__(cls) -> SimulatedGenerator:
        generator = PlainGenerator.__new__(cls, "cpu")  # type: ignore[call-arg]
        generator._offset = 0
        return generator

    def __init__(self) -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    def get_state(self) -> torch.Tensor:
        seed = self.initial_seed()
        words = [seed - (1 << 64) if seed >> 63 else seed, self._offset]
        return torch.tensor(words, device=CPU).view(torch.uint8)

    def set_state(self, new_state: torch.Tensor) -> SimulatedGenerator:
        if new_state.dtype is not torch.uint8 or new_state.device.type != "cpu":
            raise TypeError("RNG state must be a torch.ByteTensor")
        if new_state.numel() != _STATE * 8:
            raise RuntimeError("RNG state is wrong size")
        seed, offset = new_state.clone().view(torch.int64).tolist()
        self.manual_seed(seed)
        self._offset = offset
        return self

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> SimulatedGenerator:
        self._offset = offset
        return self

    def clone_state(self) -> SimulatedGenerator:
        return SimulatedGenerator().set_state(self.get_state())

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, other: torch.Generator) -> SimulatedGenerator:
        return self.set_state(other.get_state())

    def __reduce__(self) -> Any:
        return _rebuild, (self.get_state(),)


def _rebuild(state: torch.Tensor) -> SimulatedGenerator:
    return SimulatedGenerator().set_state(state)


class _AnyDevice(type):
    """Makes ``isinstance(generator, torch.Generator)`` true for all generators."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, PlainGenerator)

    def __call__(cls, device: Any = "cpu") -> Any:
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if wanted.type != "cuda":
            return PlainGenerator(device)
        check_ordinal(wanted)
        return SimulatedGenerator()


class Generator(metaclass=_AnyDevice):
    """Stands for ``torch.Generator``: makes a generator of the device that is asked for."""


def install(patches: PatchSet) -> None:
    """Let ``torch.Generator`` and ``torch.cuda.default_generators`` know the device."""
    patches.set(torch, "Generator", Generator)
    patches.set(torch.cuda, "default_generators", (SimulatedGenerator(),))
