"""Intervention: one camera or frame fewer in batches that have several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.interventions.base import Intervention
from trainfit.simgpu.interventions.resolution import LEAST_SIDE, MOST_CHANNELS
from trainfit.simgpu.interventions.script_state import Scene

#: Sides of the images that stand for a camera that is not there: a model that asks for each camera
#: by its name goes on, with next to nothing to compute.
SIDE: Final = 32
_FRAME: Final = "frame:"
_CAMERA: Final = "camera:"


class FewerCameras(Intervention):
    """A batch that is a dictionary with images (B, C, H, W) under several keys, or with frames
    (B, N, C, H, W) under one.

    Of several cameras the last gets images of 32 pixels a side; of frames the last is left out.
    A model that cannot do with that fails in the trial.
    """

    name = "fewer-cameras"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._cameras: dict[str, tuple[int, int]] = {}
        self._frames: dict[str, int] = {}

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        scene.on_batch.append(self._look)

    def _look(self, batch: Any) -> Any:
        found = images(batch)
        if len(found) > 1:
            self._cameras.update((key, _sides(image)) for key, image in found.items())
        self._frames.update((key, each.shape[1]) for key, each in frames(batch).items())
        return batch

    def finding(self) -> Applicability:
        if self._cameras:
            key, (height, width) = list(self._cameras.items())[-1]
            detail = f"{key!r} ({width}×{height}), one of {len(self._cameras)} images per sample"
            return Applicability(self.name, True, targets=(_CAMERA + key,), detail=detail)
        for key, count in self._frames.items():
            detail = f"one of the {count} frames of {key!r}"
            return Applicability(self.name, True, targets=(_FRAME + key,), detail=detail)
        return self.no(
            "no DataLoader returns a dictionary with several images or frames per sample"
        )

    def apply(self, scene: Scene) -> None:
        scene.on_batch.append(self._leave_out)

    def _leave_out(self, batch: Any) -> Any:
        if not isinstance(batch, Mapping):
            return batch
        (target,) = self.targets
        kind, _, key = target.partition(":")
        if not isinstance(batch.get(key), torch.Tensor):
            return batch
        whole = batch[key]
        less = whole[:, :-1] if kind == _FRAME[:-1] else whole[..., :SIDE, :SIDE]
        less = less.contiguous()
        self.changed += 1
        return {**batch, key: less.pin_memory() if whole.is_pinned() else less}


def images(batch: Any) -> dict[str, torch.Tensor]:
    """Tensors (B, C, H, W) that are images of one number of channels, by their keys."""
    found = {
        key: value
        for key, value in _tensors(batch).items()
        if value.dim() == 4 and value.shape[1] <= MOST_CHANNELS and min(_sides(value)) >= LEAST_SIDE
    }
    channels = max((value.shape[1] for value in found.values()), default=0)
    return {key: value for key, value in found.items() if value.shape[1] == channels}


def frames(batch: Any) -> dict[str, torch.Tensor]:
    """Tensors (B, N, C, H, W) of two frames or more, by their keys."""
    return {
        key: value
        for key, value in _tensors(batch).items()
        if value.dim() == 5
        and value.shape[1] > 1
        and value.shape[2] <= MOST_CHANNELS
        and min(_sides(value)) >= LEAST_SIDE
    }


def _tensors(batch: Any) -> dict[str, torch.Tensor]:
    if not isinstance(batch, Mapping):
        return {}
    return {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}


def _sides(image: torch.Tensor) -> tuple[int, int]:
    return image.shape[-2], image.shape[-1]
