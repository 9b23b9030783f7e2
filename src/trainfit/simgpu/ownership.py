"""What memory of the device is for, and whose: told of modules, parameters and optimizers."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from trainfit.simgpu.recording.recorder import Recorder
from trainfit.simgpu.tensors.tensor import DeviceTensor, plain
from trainfit.torch_private.modules import buffers_of, parameters_of


class Ownership:
    """Marks the recorder's allocations.

    ``parameters`` are the model's, as a recording's header has them, by allocation and offset.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._owners: dict[int, int] = {}
        self.parameters: dict[tuple[int, int], list[Any]] = {}

    def meet(self, module: torch.nn.Module, name: int) -> None:
        """A module is met for the first time: its parameters and buffers are known now."""
        for parameter in parameters_of(module).values():
            if parameter is not None:
                self._owners.setdefault(id(parameter), name)
                self.mark_parameter(parameter, name)
        for buffer in buffers_of(module).values():
            self.mark(buffer, "buffer", name)
        # The ids of a dead module's parameters may come back as another's.
        ids = [id(parameter) for parameter in parameters_of(module).values()]
        weakref.finalize(module, _forget, self._owners, ids).atexit = False

    def move(self, module: torch.nn.Module) -> None:
        """A module was moved; which path it has in a model is known when it is called."""
        for parameter in parameters_of(module).values():
            self.mark(parameter, "parameter")
        for buffer in buffers_of(module).values():
            self.mark(buffer, "buffer")

    def materialize(self, tensor: torch.Tensor) -> None:
        """A parameter or buffer of a lazy module got its shape."""
        if isinstance(tensor, torch.nn.Parameter):
            self.mark_parameter(tensor, self._owners.get(id(tensor), -1))
        else:
            self.mark(tensor, "buffer")

    def mark(self, tensor: Any, kind: str, module: int = -1) -> None:
        """Say what a tensor's memory is for (:data:`trainfit.results.runs.recording.KINDS`)."""
        if isinstance(tensor, DeviceTensor) and (number := plain(tensor)._life.number) >= 0:
            self._recorder.mark(number, kind, module)

    def mark_parameter(self, parameter: Any, module: int, *, trained: bool = False) -> None:
        """A parameter of a module that was called, or of an optimizer (``trained``)."""
        self.mark(parameter, "parameter", module)
        if not isinstance(parameter, DeviceTensor):
            return
        if (number := plain(parameter)._life.number) < 0:
            return
        # cuDNN's recurrent layers keep all of their weights in one allocation.
        place = number, int(parameter.storage_offset())
        known = self.parameters.get(place)
        if known is None:
            dtype = str(parameter.dtype).removeprefix("torch.")
            self.parameters[place] = [number, list(parameter.shape), dtype, trained]
        elif trained:
            known[3] = True

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer comes to update its parameters, by their gradients."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owner = self._owners.get(id(parameter), -1)
                self.mark_parameter(parameter, owner, trained=True)
                self.mark(parameter.grad, "gradient", owner)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It has updated them, and may have made state for it."""
        for parameter, state in optimizer.state.items():
            owner = self._owners.get(id(parameter), -1)
            for value in state.values() if isinstance(state, dict) else ():
                self.mark(value, "optimizer_state", owner)


def _forget(owners: dict[int, int], parameters: list[int]) -> None:
    for parameter in parameters:
        owners.pop(parameter, None)
