"""Intervention: channels_last memory format for convolution networks."""

from __future__ import annotations

from typing import Any

import torch

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.interventions.base import Intervention
from trainfit.simgpu.interventions.script_state import Scene
from trainfit.torch_private.dispatching import map_leaves


class ChannelsLast(Intervention):
    """Models and image batches in ``torch.channels_last``."""

    name = "channels-last"

    def finding(self) -> Applicability:
        convolutions = [
            module
            for model in self.scene.models
            for module in model.modules()
            if isinstance(module, torch.nn.Conv2d | torch.nn.ConvTranspose2d)
        ]
        wide = [conv for conv in convolutions if max(conv.kernel_size) > 1]
        if not wide:
            return self.no("the model has no 2-d convolutions larger than 1x1")
        if all(conv.weight.is_contiguous(memory_format=torch.channels_last) for conv in wide):
            return self.no("the model is already in channels_last")
        return Applicability(self.name, True, detail=type(self.scene.models[0]).__name__)

    def apply(self, scene: Scene) -> None:
        self.scene = scene
        scene.on_model.append(self._convert)
        scene.on_batch.append(self._convert_batch)

    def _convert(self, model: torch.nn.Module) -> None:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.changed += 1

    def _convert_batch(self, batch: Any) -> Any:
        return map_leaves(torch.Tensor, _in_channels_last, batch)


def _in_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 4:
        return tensor
    pinned = tensor.is_pinned()
    tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor.pin_memory() if pinned else tensor
