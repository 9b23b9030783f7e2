"""The split of a batch's time against timers around the same functions, and what looking costs.

    python bench/loader_split.py [--quick] [--seconds 2] [--rounds 5] [--json]

Each workload times its own stages with two calls of the clock around each; the looks know
nothing of that. Printed are both shares of each stage in percent, and the batch's time while it
is looked at divided by its time while it is not (medians of rounds in turn).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _bench import Figure, finish
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from trainfit.loader.measure.batch_profile import PARTS, Watcher, parts_of, share
from trainfit.loader.measure.workload import Workload
from trainfit.results.dataloader import LoaderSettings

SAMPLES = 64
SPENT: dict[str, float] = dict.fromkeys(PARTS, 0.0)


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    SPENT[name] += time.perf_counter() - began


class Jpegs(Dataset[Any]):
    """Decoding and resizing in C that gives up the interpreter's lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        noise = np.random.default_rng(0).integers(0, 255, (240, 320, 3), dtype=np.uint8)
        for index in range(SAMPLES):
            Image.fromarray(noise).save(folder / f"{index}.jpg")

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        with stage("read"), open(self.folder / f"{index}.jpg", "rb") as file:
            data = file.read()
        with stage("decode"):
            image = Image.open(io.BytesIO(data)).convert("RGB")
            image.load()
        with stage("transform"):
            return torch.from_numpy(np.array(image.resize((224, 224)))).permute(2, 0, 1).float()


class Locked(Dataset[Any]):
    """The same kinds of work by code that keeps the lock: Python loops and small C calls."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "packed"
        self.path.write_bytes(zlib.compress(bytes(range(256)) * 40))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        with stage("read"):
            packed = b"".join(self.path.read_bytes() for _ in range(10))
        with stage("decode"):
            values = [zlib.decompress(packed)[index] for _ in range(20)]
        with stage("transform"):
            return self.augment(values)

    def augment(self, values: list[int]) -> int:
        total = pow(3, 20_000) % 7
        for each in range(6_000):
            total += each * values[each % 20] % 7
        return total


class Tensors(Dataset[Any]):
    """Little but collation."""

    def __init__(self, folder: Path) -> None:
        self.rows = torch.randn(SAMPLES, 20, 50)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        with stage("transform"):
            return {str(row): self.rows[index, row] * 2 for row in range(20)}


def collate(samples: list[Any]) -> Any:
    with stage("collate"):
        return default_collate(samples)


def rate(batches: Iterator[Any], seconds: float) -> float:
    """Seconds of a batch."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        next(batches)
        count += 1
    return (time.perf_counter() - began) / count


def compare(
    dataset: Any, seconds: float, rounds: int
) -> tuple[dict[str, tuple[float, ...]], float]:
    """Timed and looked-at share of each part, and by how much looking slows a batch."""
    workload = Workload(DataLoader(dataset, 8, collate_fn=collate))
    batches = iter(workload.loader(LoaderSettings(num_workers=0)))
    rate(batches, 0.2)
    SPENT.update(dict.fromkeys(PARTS, 0.0))
    looked, free, errors = [], [], []
    for _ in range(rounds):
        free.append(rate(batches, seconds))
        SPENT.update(dict.fromkeys(PARTS, 0.0))
        watcher = Watcher()
        with watcher:
            looked.append(rate(batches, seconds))
        watcher.batch_made()
        parts = parts_of(watcher.looks())
        total = sum(SPENT.values())
        errors.append({name: (SPENT[name] / total, share(parts, name)) for name in PARTS})
    medians = {
        name: tuple(statistics.median(each[name][side] for each in errors) for side in (0, 1))
        for name in PARTS
    }
    slower = statistics.median(a / b for a, b in zip(looked, free, strict=True)) - 1
    return medians, slower


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="as it is: it takes a minute")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    torch.set_num_threads(1)
    details: dict[str, Any] = {}
    gaps, slow = [], []
    with tempfile.TemporaryDirectory() as folder:
        for kind in (Jpegs, Locked, Tensors):
            shares, slower = compare(kind(Path(folder)), words.seconds, words.rounds)
            details[kind.__name__] = {"timed, looked at": shares, "slower": slower}
            slow.append(slower)
            gaps += [abs(timed - seen) for timed, seen in shares.values()]
            if not words.json:
                report(kind.__name__, shares)
    figures = [
        Figure("largest gap of a share", 100 * max(gaps), 5, True, " points"),
        Figure("slower while looked at, at most", 100 * max(slow), 5, True, "%"),
    ]
    return finish(figures, words.json, details)


def report(name: str, shares: dict[str, tuple[float, ...]]) -> None:
    for part, (timed, seen) in shares.items():
        if timed or seen:
            print(f"{name:8} {part:10} timed {timed:6.1%}   looked at {seen:6.1%}")


if __name__ == "__main__":
    sys.exit(main())
