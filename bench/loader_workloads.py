"""The DataLoaders that loader_accuracy.py studies: small, seeded, and each slow for another reason.

Files are made once, below a folder that is given, from fixed seeds. Samples are of the kinds
that people train on; images are smooth random fields, because noise decodes unlike pictures.

    python bench/loader_workloads.py [--data DIR]     make the files; what each batch costs here
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import io
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data" / "loader-bench"
ACT = ROOT / "examples" / "act"
SEED = 20260


class NotInstalledError(Exception):
    """A workload's package is not there; the message is what to type."""


@dataclass(frozen=True)
class Case:
    """A workload: its data set from a folder and a number of samples, and its loader.

    ``needs`` is the package (and the name that it is imported by) that it cannot do without.
    """

    name: str
    what: str
    batch_size: int
    samples: int
    make: Callable[[Path, int], Dataset[Any]]
    collate: Callable[[list[Any]], Any] | None = None
    needs: str = ""

    def dataset(self, folder: Path, samples: int | None = None) -> Dataset[Any]:
        """Raises :class:`NotInstalledError`. Makes the files if they are absent."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            raise NotInstalledError(f"not installed: pip install {self.needs}")
        return self.make(folder, samples or self.samples)

    def loader(self, folder: Path, samples: int | None = None) -> DataLoader[Any]:
        """A loader with PyTorch's default settings, shuffled (by PyTorch's global generator)."""
        return DataLoader(
            self.dataset(folder, samples),
            self.batch_size,
            shuffle=True,
            drop_last=True,
            collate_fn=self.collate,
        )


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


def quantile_amounts(mean: float, sigma: float, count: int, seed: int) -> np.ndarray:
    """``count`` lognormal amounts, one of each quantile, in random order.

    An epoch then holds the whole distribution, tail too, and no two epochs differ.
    """
    normal = NormalDist()
    middles = np.array([normal.inv_cdf((each + 0.5) / count) for each in range(count)])
    amounts = np.exp(sigma * middles)
    amounts *= mean / amounts.mean()
    return np.random.default_rng([SEED, seed]).permutation(amounts)


class Worker:
    """Real work on a core, in rounds: a filter on a 64 × 64 field by FFT, about 0.1 ms each."""

    def __init__(self) -> None:
        chance = np.random.default_rng(SEED)
        self.field = chance.normal(size=(64, 64))
        self.filter = np.exp(-np.linspace(0, 4, 64))[:, None] * np.exp(-np.linspace(0, 2, 33))

    def rounds(self, count: int, field: np.ndarray | None = None) -> np.ndarray:
        """The field (64, 64) after so many rounds."""
        field = self.field if field is None else field
        for _ in range(count):
            field = np.fft.irfft2(np.fft.rfft2(field) * self.filter) + self.field
        return field


# Files of images ---------------------------------------------------------------------------------


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


class Boxes(Images):
    """For detection: an image (3, 240, 320) uint8 with boxes, labels, masks and an id each."""

    def __getitem__(self, index: int) -> Any:
        pixels = torch.from_numpy(np.array(self.decoded(index))).permute(2, 0, 1).contiguous()
        count = 3 + index % 9
        corner = torch.rand(count, 2) * 160
        boxes = torch.cat((corner, corner + 8 + torch.rand(count, 2) * 70), 1)
        masks = torch.zeros(count, 120, 160, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, (boxes / 2).int().tolist(), strict=True):
            mask[top:bottom, left:right] = 1
        return pixels, {
            "boxes": boxes,
            "labels": torch.randint(0, 80, (count,)),
            "masks": masks,
            "image_id": torch.tensor(index),
        }


def as_lists(samples: list[Any]) -> tuple[list[Any], ...]:
    """Images and targets as lists (detection's usual collation): tensors are not stacked."""
    return tuple(list(each) for each in zip(*samples, strict=True))


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


def boxes(folder: Path, samples: int) -> Dataset[Any]:
    return Boxes(image_paths(folder, samples, "jpg", 240, 320, quality=85))


# Video -------------------------------------------------------------------------------------------


def act_video(folder: Path, samples: int) -> Dataset[Any]:
    """The ACT example's own data set, of four episodes (fewer if there are few samples)."""
    if str(ACT) not in sys.path:
        sys.path.append(str(ACT))
    make, module = (importlib.import_module(name) for name in ("make_dataset", "dataset"))
    episodes = min(4, samples)
    frames = samples // episodes

    def write(scratch: Path) -> None:
        words = [f"--out={scratch}", f"--episodes={episodes}", f"--frames={frames}"]
        options = make.parse_options(words)
        scratch.rmdir()  # it makes its own
        make.make_dataset(scratch, options)

    root = kept(folder, f"act-{episodes}x{frames}", write)
    videos: Dataset[Any] = module.EpisodeDataset(root, chunk_size=100, image_scale=0.5)
    return videos


# Arrays ------------------------------------------------------------------------------------------


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows (1024, 32) float32 of one long recording in a NumPy file, normalised each."""

    LENGTH, CHANNELS, STEP = 1024, 32, 64

    def __init__(self, path: str, samples: int) -> None:
        self.path, self.samples = path, samples
        self._array: np.ndarray | None = None

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._array is None:
            self._array = np.load(self.path, mmap_mode="r")
        begin = index * self.STEP
        window = np.array(self._array[begin : begin + self.LENGTH], np.float32)
        window -= window.mean(0)
        window /= window.std(0) + 1e-6
        return torch.from_numpy(window), torch.tensor(index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None}


def windows(folder: Path, samples: int) -> Dataset[Any]:
    def write(scratch: Path) -> None:
        length = Windows.STEP * samples + Windows.LENGTH
        chance = np.random.default_rng([SEED, 2])
        array = chance.normal(0, 1, (length, Windows.CHANNELS)).cumsum(0).astype(np.float16)
        np.save(scratch / "recording.npy", array)

    path = kept(folder, f"windows-{samples}", write) / "recording.npy"
    return Windows(str(path), samples)


class Cubes(Dataset[tuple[Tensor, Tensor]]):
    """Compressed chunks of an HDF5 file, a sample each: (16, 64, 64) int16 to float32."""

    SHAPE = (16, 64, 64)

    def __init__(self, path: str, samples: int) -> None:
        self.path, self.samples = path, samples
        self._file: Any = None
        self._owner = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._owner != os.getpid():  # an open HDF5 file must not cross a fork
            import h5py

            self._file, self._owner = h5py.File(self.path, "r"), os.getpid()
        cube = self._file["cubes"][index]
        return torch.from_numpy(cube).float().mul_(1 / 1024), torch.tensor(index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_owner": 0}


def cubes(folder: Path, samples: int) -> Dataset[Any]:
    def write(scratch: Path) -> None:
        import h5py

        chance = np.random.default_rng([SEED, 3])
        axes = np.meshgrid(*(np.linspace(0, 1, n) for n in Cubes.SHAPE), indexing="ij")
        with h5py.File(scratch / "cubes.h5", "w") as file:
            array = file.create_dataset(
                "cubes",
                (samples, *Cubes.SHAPE),
                "i2",
                chunks=(1, *Cubes.SHAPE),
                compression="gzip",
                shuffle=True,
            )
            for number in range(samples):
                waves = chance.uniform(1, 6, 3)
                cube = sum(np.sin(wave * axis) for wave, axis in zip(waves, axes, strict=True))
                array[number] = (900 * cube + chance.normal(0, 3, Cubes.SHAPE)).astype("i2")

    return Cubes(str(kept(folder, f"cubes-{samples}", write) / "cubes.h5"), samples)


@functools.lru_cache(maxsize=2)
def tiny(_folder: Path, samples: int) -> Dataset[Any]:
    """PyTorch's own data set of tensors in memory: features (32,) and a class each."""
    chance = torch.Generator().manual_seed(SEED)
    features = torch.randn(samples, 32, generator=chance)
    return TensorDataset(features, torch.randint(0, 10, (samples,), generator=chance))


# Work, locks, waiting ----------------------------------------------------------------------------


class Uneven(Dataset[Tensor]):
    """Work of lognormal amounts, as of scenes or documents of any length; (64, 64) float32."""

    def __init__(self, rounds: np.ndarray) -> None:
        self.amounts = rounds
        self._worker = Worker()

    def __len__(self) -> int:
        return len(self.amounts)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self._worker.rounds(int(self.amounts[index]))).float()


def uneven(_folder: Path, samples: int) -> Dataset[Any]:
    return Uneven(np.maximum(1, quantile_amounts(200, 1.2, samples, 4)).round())


class SharedDecoder(Dataset[Tensor]):
    """All workers take turns at one decoder, for two thirds of each sample's work."""

    LOCKED, FREE = 16, 8

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.decoder = multiprocessing.Lock()
        self._worker = Worker()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        with self.decoder:
            decoded = self._worker.rounds(self.LOCKED)
        return torch.from_numpy(self._worker.rounds(self.FREE, decoded)).float()


def shared_decoder(_folder: Path, samples: int) -> Dataset[Any]:
    # A new lock each time: who is killed while it holds one leaves it locked.
    return SharedDecoder(samples)


class Remote(Dataset[Tensor]):
    """Samples from afar: some milliseconds' wait each (lognormal), then a little work."""

    ROUNDS = 4

    def __init__(self, seconds: np.ndarray) -> None:
        self.seconds = seconds
        self._worker = Worker()

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds[index])
        return torch.from_numpy(self._worker.rounds(self.ROUNDS)).float()


def remote(_folder: Path, samples: int) -> Dataset[Any]:
    return Remote(quantile_amounts(0.004, 0.5, samples, 5))


CASES: tuple[Case, ...] = (
    Case("act_video", "three cameras, H.264 by PyAV", 2, 240, act_video, needs="av"),
    Case("jpeg_augment", "JPEG, crop, flip, colour", 8, 256, jpegs),
    Case("png", "PNG decode", 6, 96, pngs),
    Case("memmap", "windows of a NumPy memmap", 48, 8192, windows),
    Case("hdf5", "gzip chunks by h5py", 16, 512, cubes, needs="h5py"),
    Case("tiny_in_memory", "TensorDataset, 32 features", 2048, 131072, tiny),
    Case("heavy_tail", "lognormal work, CV above 1", 1, 96, uneven),
    Case("lock_bound", "one lock for two thirds", 8, 1024, shared_decoder),
    Case("remote", "waits for storage", 8, 512, remote),
    Case("detection", "many tensors a batch, a list each", 12, 256, boxes, collate=as_lists),
)
BY_NAME = {case.name: case for case in CASES}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA, help=f"folder of the files ({DATA})")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'workload':<16}{'batch of':>9}{'ms':>8}{'CV':>7}{'CPU':>6}")
    for case in CASES:
        try:
            loader = case.loader(options.data)
        except NotInstalledError as error:
            print(f"{case.name:<16}{error}")
            continue
        walls, cpu = batch_seconds(loader, 1.5)
        mean, deviation = statistics.fmean(walls), statistics.pstdev(walls)
        share = 100 * cpu / sum(walls)
        print(
            f"{case.name:<16}{case.batch_size:>9}{1e3 * mean:>8.1f}{deviation / mean:>7.2f}"
            f"{share:>5.0f}%"
        )
    return 0


def batch_seconds(loader: DataLoader[Any], seconds: float) -> tuple[list[float], float]:
    """What batches take in this process, the first three left out; and the CPU time of all."""
    walls: list[float] = []
    batches = iter(loader)
    for _ in range(3):
        next(batches, None)
    cpu, end = time.process_time(), time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        try:
            next(batches)
        except StopIteration:
            batches = iter(loader)
            continue
        walls.append(time.monotonic() - began)
    return walls, time.process_time() - cpu


if __name__ == "__main__":
    sys.exit(main())
