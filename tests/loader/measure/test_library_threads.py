"""Threads of native libraries: counted, held down, and found busy in a worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from trainfit.loader.measure import processes
from trainfit.loader.measure.workload import Workload, worker_threads
from trainfit.results.dataloader import LoaderSettings
from trainfit.scripts.library_threads import FFMPEG, hold_down, native_threads, pools

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
SEVERAL = pytest.mark.skipif(CORES < 2, reason="a library takes one thread on one core")
HAS_OPENBLAS = pytest.mark.skipif(
    "openblas" not in str(np.show_config("dicts")).lower(),  # type: ignore[arg-type]
    reason="NumPy without OpenBLAS",
)

#: In a process of its own, in which libraries that are loaded later are too.
HELD = """
import json, os, sys, types
import numpy, torch
from trainfit.scripts import library_threads

class Fake(types.ModuleType):
    threads = 8
    def getNumThreads(self): return self.threads
    def setNumThreads(self, most): self.threads = most

sys.modules["cv2"] = fake = Fake("cv2")
before = library_threads.pools()
library_threads.hold_down(1)
print(json.dumps({
    "before": before, "after": library_threads.pools(), "cv2": fake.threads,
    "variable": os.environ["OPENBLAS_NUM_THREADS"],
}))
"""


@SEVERAL
@HAS_OPENBLAS
def test_libraries_are_held_to_one_thread() -> None:
    held = {name for name in os.environ if name.endswith("_NUM_THREADS")}
    env = {name: value for name, value in os.environ.items() if name not in held}
    done = subprocess.run(
        [sys.executable, "-c", HELD], env=env, capture_output=True, text=True, check=True
    )
    seen = json.loads(done.stdout)
    assert seen["before"]["openblas"] == CORES and seen["before"]["opencv"] == 8
    assert seen["after"] == {}
    assert seen["cv2"] == 0  # OpenCV's word for the calling thread alone
    assert seen["variable"] == "1"


class Products(Dataset[Any]):
    """Matrix products in NumPy, which OpenBLAS shares among its threads; or sums, which it does
    not make."""

    def __init__(self, *, products: bool) -> None:
        self.products = products

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        matrix = np.full((256, 256), float(index))
        made = matrix @ matrix if self.products else matrix + matrix
        return torch.from_numpy(made)


def openblas_in_workers(settings: LoaderSettings, held_to: int | None) -> int:
    workload = Workload(DataLoader(Pools(), 1))
    if held_to is not None:
        workload = workload.held_to(held_to)
    return int(next(iter(workload.loader(settings)))[0])


class Pools(Dataset[Any]):
    """How many threads OpenBLAS has where the sample is made."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return pools().get("openblas", 1)


@SEVERAL
@HAS_OPENBLAS
def test_settings_hold_workers_down_and_the_main_process_stays() -> None:
    free = openblas_in_workers(LoaderSettings(1), None)
    if free < 2:
        pytest.skip("OpenBLAS is held down already")
    assert openblas_in_workers(LoaderSettings(1, library_threads=1), None) == 1
    assert openblas_in_workers(LoaderSettings(1), 1) == 1
    assert openblas_in_workers(LoaderSettings(0, library_threads=1), 1) == free
    assert pools().get("openblas") == free


@SEVERAL
@HAS_OPENBLAS
@pytest.mark.skipif(native_threads() is None, reason="looks for threads in /proc")
def test_threads_that_a_batch_starts_are_counted() -> None:
    if pools().get("openblas", 1) < 2:
        pytest.skip("OpenBLAS is held down already")
    used = worker_threads(Workload(DataLoader(Products(products=True), 4)), 20.0)
    unused = worker_threads(Workload(DataLoader(Products(products=False), 4)), 20.0)
    assert used.pools == unused.pools and used.pools["openblas"] > 1
    assert used.started is not None and used.started >= 1
    assert unused.started == 0
    assert used.used == ("openblas",) and unused.used == ()


#: Pictures that OpenCV blurs in several threads, in a process that has not used OpenCV before a
#: fork: of a pool that it used the workers have no threads, and OpenCV starts none again.
BLURRED = """
import json, cv2, numpy
from torch.utils.data import DataLoader
from trainfit.loader.measure.workload import worker_threads
from trainfit.loader.measure.workload import Workload

class Blurred:
    def __len__(self): return 64
    def __getitem__(self, index):
        return cv2.GaussianBlur(numpy.full((1024, 1024, 3), index, numpy.uint8), (9, 9), 0)[:8, :8]

found = worker_threads(Workload(DataLoader(Blurred(), 4)), 20.0)
print(json.dumps({"pools": found.pools, "used": found.used}))
"""


@pytest.mark.slow
@SEVERAL
@HAS_OPENBLAS
@pytest.mark.skipif(native_threads() is None, reason="looks for threads in /proc")
def test_the_pool_that_is_used_is_told_from_those_that_are_loaded() -> None:
    """OpenCV's blur starts its threads, OpenBLAS has some that nobody uses."""
    pytest.importorskip("cv2")
    env = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", BLURRED], env=env, capture_output=True, text=True, check=True
    )
    seen = json.loads(done.stdout)
    assert {"opencv", "openblas"} <= set(seen["pools"])
    assert seen["used"] == ["opencv"]


@SEVERAL
def test_ffmpeg_counts_as_many_cpus_as_it_is_told() -> None:
    """PyAV leaves the number of a decoder's threads to FFmpeg; none of it is left held here."""
    pytest.importorskip("av")
    here = pools()[FFMPEG]
    ended = processes.call(_held_ffmpeg, 20.0)
    assert here > 1 and ended.value == 1 and pools()[FFMPEG] == here


def _held_ffmpeg() -> int:
    hold_down(1)
    return pools().get(FFMPEG, 1)


@pytest.mark.parametrize("threads", [0, -1])
def test_a_library_has_a_thread_at_least(threads: int) -> None:
    with pytest.raises(ValueError, match="one thread or more"):
        LoaderSettings(1, library_threads=threads)
