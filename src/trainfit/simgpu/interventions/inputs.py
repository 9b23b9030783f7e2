"""Interventions on the batches: smaller images, one camera or frame fewer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.interventions.script_state import Intervention, Scene
from trainfit.torch_private.operators import leaves_of, map_leaves

#: Of each side: half of the pixels.
SCALE = math.sqrt(0.5)
#: Sides stay multiples of what networks divide them by.
_MULTIPLE = 32
#: Channels of an image: grey, colour, with depth or alpha.
MOST_CHANNELS = 4
#: Smaller maps are no images to shrink.
LEAST_SIDE = 64


class LowerResolution(Intervention):
    """Image batches (B, C, H, W) with sides of about 71%, rounded to multiples of 32.

    Whatever else in the batch has the image's height and width (masks) is shrunk with it,
    by leaving out rows and columns: values do not matter here, and labels stay labels.
    """

    name = "lower-resolution"

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        super().__init__(targets)
        self._sizes: dict[tuple[int, int], None] = {}

    def watch(self, scene: Scene) -> None:
        super().watch(scene)
        scene.on_batch.append(self._look)

    def _look(self, batch: Any) -> Any:
        self._sizes.update(dict.fromkeys(image_sizes(batch)))
        return batch

    def finding(self) -> Applicability:
        if not self._sizes:
            return self.no(
                "no DataLoader returns image batches (B, C, H, W) of 1 to 4 channels and sides "
                f"of {LEAST_SIDE} or more"
            )
        sizes = ", ".join(
            f"{height}×{width} to {smaller(height)}×{smaller(width)}"
            for height, width in self._sizes
        )
        return Applicability(self.name, True, detail=sizes)

    def apply(self, scene: Scene) -> None:
        scene.on_batch.append(self._shrink_batch)

    def _shrink_batch(self, batch: Any) -> Any:
        sizes = set(image_sizes(batch))

        def shrink(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() < 2 or tuple(tensor.shape[-2:]) not in sizes:
                return tensor
            self.changed += 1
            return shrunk(tensor)

        return map_leaves(torch.Tensor, shrink, batch)


def image_sizes(batch: Any) -> list[tuple[int, int]]:
    """Height and width of the image-shaped tensors in a batch."""
    return [
        (leaf.shape[-2], leaf.shape[-1])
        for leaf in leaves_of(batch)
        if isinstance(leaf, torch.Tensor)
        and leaf.dim() == 4
        and leaf.shape[1] <= MOST_CHANNELS
        and min(leaf.shape[-2:]) >= LEAST_SIDE
    ]


def smaller(side: int) -> int:
    """The side for about half of the pixels."""
    return max(_MULTIPLE, round(side * SCALE / _MULTIPLE) * _MULTIPLE)


def shrunk(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with fewer rows and columns, taken at even distances."""
    pinned = tensor.is_pinned()
    for dim in (-2, -1):
        side = tensor.shape[dim]
        rows = torch.arange(smaller(side)) * side // smaller(side)
        tensor = tensor.index_select(dim, rows)
    return tensor.pin_memory() if pinned else tensor


# ---
# Intervention: one camera or frame fewer in batches that have several.


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
        self._frames.update((key, tensor.shape[1]) for key, tensor in frames(batch).items())
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
