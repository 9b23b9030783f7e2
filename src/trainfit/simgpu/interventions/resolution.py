"""Intervention: smaller images from the DataLoader."""

from __future__ import annotations

import math
from typing import Any

import torch

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.interventions.base import Intervention
from trainfit.simgpu.interventions.script_state import Scene
from trainfit.torch_private.dispatching import leaves_of, map_leaves

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
