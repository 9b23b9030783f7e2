"""What a DataLoader was seen to give: samples, shapes, and a look at its data set's samples."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import fetch

from trainfit.results.runs.trace import LoaderInfo, LoaderOverride, SampleOverride
from trainfit.scripts.batch_sizes import elements, repeated, scan_samples
from trainfit.scripts.dataloader import LoaderTracker
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.data_loading import workers_of

TEXTS = [torch.ones(length, dtype=torch.long) for length in (5, 3, 9, 1, 7, 2)]


def collate(texts: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(texts, batch_first=True)


def watched(make: Callable[[], DataLoader[Any]], **options: Any) -> tuple[LoaderInfo, list[Any]]:
    """One epoch under a tracker."""
    tracker, patches = LoaderTracker(**options), PatchSet()
    tracker.install(patches)
    try:
        loader = make()
        batches = list(loader)
        found = tracker.feeding()
    finally:
        patches.restore()
    assert found is not None
    return found, batches


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(5, 3))


class Endless(DataLoader[Any]):
    """As Ultralytics': one iterator for all epochs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", _Repeated(self.batch_sampler))
        self.batches: Any = None

    def __iter__(self) -> Any:
        if self.batches is None:
            self.batches = self._get_iterator()
        for _ in range(2):
            yield next(self.batches)


class _Repeated:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


def test_the_samples_of_each_batch() -> None:
    found, _ = watched(lambda: DataLoader(torch.zeros(10, 3), 4))
    assert (found.fed, found.samples, found.varies) == ((4, 4, 2), 10, False)
    whole, _ = watched(lambda: DataLoader(torch.zeros(10, 3), 64))
    assert (whole.fed, whole.batch_size) == ((10,), 64)
    stream, _ = watched(lambda: DataLoader(Stream(), 64))
    assert (stream.fed, stream.samples) == ((5,), None)


def test_an_endless_loader_is_seen() -> None:
    found, _ = watched(lambda: Endless(torch.zeros(10, 3), 4))
    assert (found.fed, found.samples, found.batch_size) == ((4, 4), 10, 4)
    larger, _ = watched(lambda: Endless(torch.zeros(10, 3), 4), override=LoaderOverride(0, 16))
    assert larger.fed == (10, 10)


@pytest.mark.parametrize(
    ("batch", "varies"), [(2, True), (1, True), (6, False)], ids=["pairs", "single", "whole"]
)
def test_padded_batches_vary(batch: int, varies: bool) -> None:
    found, _ = watched(lambda: DataLoader(TEXTS, batch, collate_fn=collate))  # type: ignore[arg-type]
    assert found.varies == varies


@pytest.mark.parametrize("drop", [True, False])
def test_whether_the_last_batch_is_dropped(drop: bool) -> None:
    found, _ = watched(lambda: DataLoader(torch.zeros(5, 3), 2, drop_last=drop))
    assert found.drops_last == drop


def test_only_full_batches_are_compared() -> None:
    found, _ = watched(lambda: DataLoader(torch.zeros(5, 3), 2))
    assert not found.varies


def test_the_longest_sample_and_the_median() -> None:
    loader = DataLoader(TEXTS, 2, collate_fn=collate)  # type: ignore[arg-type]
    found = scan_samples(loader)
    assert (found.looked_at, found.samples) == (6, 6)
    assert (found.longest, found.longest_elements) == (2, 9)
    assert (found.typical, found.typical_elements) == (0, 5)
    assert repeated(loader, SampleOverride(0, found.longest), 4).shape == (4, 9)
    # One of them is shorter: a mask of such a batch is not all ones.
    padded = repeated(loader, SampleOverride(0, found.longest, found.typical), 4)
    assert padded.sum(1).tolist() == [9, 9, 9, 5]
    assert repeated(loader, SampleOverride(0, found.longest, found.typical), 1).shape == (1, 9)


def joined(texts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(texts)


def test_the_sample_to_which_a_usual_batch_is_padded() -> None:
    """Lengths 1 to 320, shuffled: the longest of 32 is at about 31 of 32 parts of them."""
    texts = [torch.ones(1 + length * 7 % 320) for length in range(320)]
    found = scan_samples(DataLoader(texts, 4, collate_fn=collate))  # type: ignore[arg-type]
    assert 300 <= found.padded_elements <= 320
    assert found.padded is not None and len(texts[found.padded]) == found.padded_elements
    assert found.typical_elements == 161
    # Where the sampler puts samples of like length together, it is the batch's own.
    alike = sorted(texts, key=len)
    found = scan_samples(DataLoader(alike, 4, collate_fn=collate))  # type: ignore[arg-type]
    assert found.padded_elements == 192  # of ten times 32 samples, the sixth
    # Samples that are put one after the other are not padded.
    found = scan_samples(DataLoader(texts, 4, collate_fn=joined))  # type: ignore[arg-type]
    assert found.padded is None


def test_samples_of_a_loader_that_only_its_loop_holds() -> None:
    tracker, patches = LoaderTracker(), PatchSet()
    tracker.install(patches)
    try:
        for seen, _ in enumerate(DataLoader(TEXTS, 2, collate_fn=collate)):  # type: ignore[arg-type]
            if seen == 2:
                found = tracker.scan()
        after = tracker.scan()
    finally:
        patches.restore()
    assert found is not None and found.longest_elements == 9
    assert after is None  # it is not kept any longer than the loop


def test_batches_of_one_sample() -> None:
    found, batches = watched(
        lambda: DataLoader(TEXTS, 4, collate_fn=collate),  # type: ignore[arg-type]
        sample=SampleOverride(0, 0),
    )
    assert [tuple(each.shape) for each in batches] == [(4, 5), (2, 5)]
    assert (found.fed, found.varies) == ((4, 2), False)
    _, others = watched(
        lambda: DataLoader(TEXTS, 4, collate_fn=collate),  # type: ignore[arg-type]
        sample=SampleOverride(1, 0),
    )
    assert others[0].shape == (4, 9)  # another loader's are left as they are


class Crops(Dataset[torch.Tensor]):
    """Of a random size each time."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(random.randrange(1, 50) + np.random.randint(50) + int(torch.rand(1) * 9))


def test_random_samples_are_made_again_as_they_were_seen() -> None:
    loader = DataLoader(Crops(), 2)
    random.seed(7)
    before = random.getstate(), torch.get_rng_state()
    found = scan_samples(loader)
    assert scan_samples(loader) == found
    assert repeated(loader, SampleOverride(0, found.longest), 3).shape == (
        3,
        found.longest_elements,
    )
    # The script's own random numbers go on as if nobody had looked.
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


class Bad(Crops):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise RuntimeError("no file")


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Stream(), 2), "cannot be indexed"),
        (DataLoader(torch.zeros(3, 2), batch_size=None), "cannot be indexed"),  # type: ignore[arg-type]
        (DataLoader(Bad(), 2), "failed (RuntimeError: no file)"),
        (DataLoader({"a": 1}, sampler=["a"]), "not indexed by integers"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_looked_at_is_said(loader: DataLoader[Any], reason: str) -> None:
    assert reason in scan_samples(loader).reason


@pytest.mark.parametrize(
    ("sample", "size"),
    [
        (torch.zeros(3, 4), 12),
        ({"ids": [1, 2, 3], "label": 0}, 4),
        (("a text", np.zeros((2, 2))), 10),
        ([torch.zeros(2), torch.zeros(3)], 5),
        (3.0, 1),
        ([], 0),
    ],
)
def test_elements_of_a_sample(sample: object, size: int) -> None:
    assert elements(sample) == size


class Slow(Dataset[Any]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.zeros(2)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_sample_needs_is_timed_where_it_is_fetched(workers: int) -> None:
    """Not how long the script waits: for workers that is their start, too."""
    tracker, patches = LoaderTracker(), PatchSet()
    assert tracker.sample_s() is None
    tracker.install(patches)
    try:
        list(DataLoader(Slow(0.01), 2, num_workers=workers))
    finally:
        patches.restore()
    sample_s = tracker.sample_s()
    assert sample_s is not None and sample_s >= 0.01
    assert fetch._MapDatasetFetcher.fetch.__qualname__ == "_MapDatasetFetcher.fetch"


def test_loaders_are_shut_down_and_can_be_iterated_again() -> None:
    tracker, patches = LoaderTracker(), PatchSet()
    tracker.install(patches)
    try:
        loader: DataLoader[Any] = DataLoader(
            Slow(0.0),
            2,
            num_workers=1,
            persistent_workers=True,
        )
        first = iter(loader)
        next(first)
        (worker,) = workers_of(first)
        tracker.shut_down()
        assert not worker.is_alive()
        batches = iter(loader)
        assert batches is not first and len(list(batches)) == len(loader)
        tracker.shut_down()
    finally:
        patches.restore()
