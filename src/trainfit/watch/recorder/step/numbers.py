"""The numbers of a step: its loss, its loss scale and its gradient's norm."""

from __future__ import annotations

import math
from typing import Any

import torch

from trainfit.torch_private.tensors import item
from trainfit.watch.recorder.step.cuda_events import Device
from trainfit.watch.recorder.step.gpu_step import GpuStep


class StepNumbers:
    """What is on a GPU comes with the step's row, without waiting for it."""

    __slots__ = ("loss", "loss_is_scaled", "norm", "scale")

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.loss: float | None = None
        self.scale = self.norm = math.nan
        self.loss_is_scaled = False

    def note_loss(self, roots: Any, device: Device | None, gpu: GpuStep | None) -> None:
        """Of a backward pass from ``roots``. A loss that is not finite stays, whatever follows."""
        root = roots if isinstance(roots, torch.Tensor) else next(iter(roots), None)
        if root is None or root.numel() != 1 or root.is_complex():
            return
        value = number("loss", root, device, gpu)
        if value is not None and (self.loss is None or math.isfinite(self.loss)):
            self.loss = value


def number(
    name: str, tensor: torch.Tensor, device: Device | None, gpu: GpuStep | None
) -> float | None:
    """The value of a tensor of one element: now, or with the step's row if it is on a GPU."""
    if not tensor.is_cuda:
        return float(item(tensor)) if tensor.device.type == "cpu" else None
    if device is not None and gpu is not None:
        before = gpu.numbers.pop(name, None)
        kept = device.keep(tensor)
        if kept is not None:
            gpu.numbers[name] = kept
        if before is not None:
            device.value(before)  # frees its room; its copy is over before the new one
    return None
