"""Image files for _loader_workloads.py, and data sets that decode them."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

SEED = 20260


def kept(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    """``folder / name``, which ``write`` fills if it is absent; it appears whole or not at all."""
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))
        try:
            write(scratch)
            scratch.rename(path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return path


def smooth_image(seed: int, height: int, width: int, finest: int = 32) -> np.ndarray:
    """(height, width, 3) uint8: a sum of random fields, the finer the weaker, and faint grain."""
    from PIL import Image

    chance = np.random.default_rng([SEED, seed])
    total = np.zeros((height, width, 3), np.float32)
    cells = 4
    while cells <= finest:
        coarse = chance.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        field = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        total += (np.asarray(field, np.float32) - 127.5) * (4 / cells)
        cells *= 2
    total += chance.normal(0, 1.5, total.shape)
    return np.clip(127.5 + 0.7 * total, 0, 255).astype(np.uint8)


class Images(Dataset[tuple[Tensor, int]]):
    """Image files, decoded by Pillow."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def decoded(self, index: int) -> Any:
        from PIL import Image

        data = Path(self.paths[index]).read_bytes()
        return Image.open(io.BytesIO(data)).convert("RGB")


class AugmentedJpegs(Images):
    """JPEG decode, random resized crop, flip, brightness and contrast; (3, 192, 192) float32."""

    SIZE = 192

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image, ImageEnhance

        image = self.decoded(index)
        width, height = image.size
        share, left, top, bright, contrast, flip = torch.rand(6).tolist()
        side = round(min(width, height) * (0.5 + 0.5 * share))
        x, y = round(left * (width - side)), round(top * (height - side))
        image = image.resize(
            (self.SIZE, self.SIZE), Image.Resampling.BILINEAR, (x, y, x + side, y + side)
        )
        if flip < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        image = ImageEnhance.Brightness(image).enhance(0.6 + 0.8 * bright)
        image = ImageEnhance.Contrast(image).enhance(0.6 + 0.8 * contrast)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels.float().div_(255).sub_(0.45).div_(0.225), index % 10


class Pngs(Images):
    """PNG decode alone; (3, 288, 384) uint8."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = torch.from_numpy(np.array(self.decoded(index)))
        return pixels.permute(2, 0, 1).contiguous(), index % 10


def image_paths(
    folder: Path, samples: int, kind: str, height: int, width: int, **options: Any
) -> list[str]:
    def write(scratch: Path) -> None:
        from PIL import Image

        for number in range(samples):
            image = Image.fromarray(smooth_image(number, height, width))
            image.save(scratch / f"{number:04d}.{kind}", **options)

    return sorted(map(str, kept(folder, f"{kind}-{height}x{width}-{samples}", write).iterdir()))


def jpegs(folder: Path, samples: int) -> Dataset[Any]:
    return AugmentedJpegs(image_paths(folder, samples, "jpg", 375, 500, quality=90))


def pngs(folder: Path, samples: int) -> Dataset[Any]:
    return Pngs(image_paths(folder, samples, "png", 288, 384))
