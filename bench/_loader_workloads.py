"""The DataLoaders that loader_accuracy.py studies: small, seeded, and each slow for another reason.

Files are made once, below a folder that is given, from fixed seeds. Samples are of the kinds
that people train on; images are smooth random fields, because noise decodes unlike pictures.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from _loader_images import SEED, jpegs, kept, pngs
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data" / "loader-bench"
ACT = ROOT / "examples" / "act"


class NotInstalledError(Exception):
    """A workload's package is not there; the message is what to type."""


@dataclass(frozen=True)
class LoaderCase:
    """A workload: its data set from a folder and a number of samples, and its loader.

    ``needs`` is the package (and the name that it is imported by) that it cannot do without.
    """

    name: str
    what: str
    batch_size: int
    samples: int
    make: Callable[[Path, int], Dataset[Any]]
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
        )


def quantile_amounts(mean: float, sigma: float, count: int, seed: int) -> np.ndarray:
    """``count`` lognormal amounts, one of each quantile, in random order.

    An epoch then holds the whole distribution, tail too, and no two epochs differ.
    """
    normal = NormalDist()
    middles = np.array([normal.inv_cdf((index + 0.5) / count) for index in range(count)])
    amounts = np.exp(sigma * middles)
    amounts *= mean / amounts.mean()
    return np.random.default_rng([SEED, seed]).permutation(amounts)


class FilterRounds:
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
        self._worker = FilterRounds()

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
        self._worker = FilterRounds()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        with self.decoder:
            decoded = self._worker.rounds(self.LOCKED)
        return torch.from_numpy(self._worker.rounds(self.FREE, decoded)).float()


def shared_decoder(_folder: Path, samples: int) -> Dataset[Any]:
    # A new lock each time: who is killed while it holds one leaves it locked.
    return SharedDecoder(samples)


CASES: tuple[LoaderCase, ...] = (
    LoaderCase("act_video", "three cameras, H.264 by PyAV", 2, 240, act_video, needs="av"),
    LoaderCase("jpeg_augment", "JPEG, crop, flip, colour", 8, 256, jpegs),
    LoaderCase("png", "PNG decode", 6, 96, pngs),
    LoaderCase("memmap", "windows of a NumPy memmap", 48, 8192, windows),
    LoaderCase("hdf5", "gzip chunks by h5py", 16, 512, cubes, needs="h5py"),
    LoaderCase("tiny_in_memory", "TensorDataset, 32 features", 2048, 131072, tiny),
    LoaderCase("heavy_tail", "lognormal work, CV above 1", 1, 96, uneven),
    LoaderCase("lock_bound", "one lock for two thirds", 8, 1024, shared_decoder),
)
BY_NAME = {case.name: case for case in CASES}
