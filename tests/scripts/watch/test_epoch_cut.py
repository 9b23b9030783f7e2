"""Epochs that are cut short: of which DataLoaders."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from trainfit.results.runs.trace import LoaderCut, LoaderOverride
from trainfit.scripts.dataloader import LoaderTracker
from trainfit.simgpu.patching import PatchSet


class Shard(BatchSampler):
    """A process's share of another's batches, as Accelerate makes it: here all of them."""

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler)


@pytest.fixture
def tracker() -> Iterator[LoaderTracker]:
    patches = PatchSet()
    tracker = LoaderTracker(cut=LoaderCut(index=0, batches=2, others=3))
    tracker.install(patches)
    yield tracker
    patches.restore()


def _data() -> TensorDataset:
    return TensorDataset(torch.zeros(40, 1))


@pytest.mark.parametrize("shard", [None, Shard])
def test_of_a_loader_that_was_made_of_the_trainings(
    tracker: LoaderTracker, shard: type[Shard] | None
) -> None:
    """A library's ``prepare`` makes it, on a line of its own, of the first one's batch sampler."""
    ended = []
    tracker.epochs.ended = lambda: ended.append(True)
    first = DataLoader(_data(), batch_size=4, shuffle=True)
    sampler = first.batch_sampler
    assert isinstance(sampler, BatchSampler)
    made = DataLoader(first.dataset, batch_sampler=sampler if shard is None else shard(sampler))
    assert (len(list(made)), len(made), len(ended)) == (2, 2, 1)


def test_of_an_evaluations_loader(tracker: LoaderTracker) -> None:
    ended = []
    tracker.epochs.ended = lambda: ended.append(True)
    data = _data()
    first = DataLoader(data, batch_size=4)
    other = DataLoader(data, batch_size=4)
    assert (len(list(first)), len(ended)) == (2, 1)
    assert (len(list(other)), len(ended)) == (3, 1)


def _by_count(loader: DataLoader[tuple[torch.Tensor, ...]], rounds: int) -> list[int]:
    """Batches of each of two epochs that ask for so many."""
    found = []
    for _ in range(2):
        batches, given = iter(loader), 0
        for _ in range(rounds):
            (batch,) = next(batches)
            given += len(batch) > 0
        found.append(given)
    return found


def _by_while(loader: DataLoader[tuple[torch.Tensor, ...]], rounds: int) -> list[int]:
    def given() -> torch.Tensor:
        return next(batches)[0]

    found = []
    for _ in range(2):
        batches, done = iter(loader), 0
        while done < rounds:
            batch = given()
            done += len(batch) > 0
        found.append(done)
    return found


def _until_the_end(loader: DataLoader[tuple[torch.Tensor, ...]], rounds: int) -> list[int]:
    found = []
    for _ in range(2):
        batches, given = iter(loader), 0
        while given < rounds:
            try:
                next(batches)
            except StopIteration:
                break
            given += 1
        found.append(given)
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_that_asks_for_a_number_of_batches_is_left(
    tracker: LoaderTracker, workers: int
) -> None:
    """It would end by a StopIteration that the script does not expect; one that it does expect
    comes as it would."""
    ended = []
    tracker.epochs.ended = lambda: ended.append(True)
    first = DataLoader(_data(), batch_size=4, num_workers=workers)
    assert (_by_count(first, 8), bool(ended)) == ([2, 2], True)
    assert _until_the_end(first, 8) == [2, 2]
    assert sys.gettrace() is None


def test_so_is_a_while_loop_that_calls_a_function_for_each_batch(tracker: LoaderTracker) -> None:
    first = DataLoader(_data(), batch_size=4)
    assert _by_count(first, 2) == [2, 2]
    other = DataLoader(_data(), batch_size=4)
    assert len(_by_while(other, 9)) == 2
    assert sys.gettrace() is None


def test_an_iterator_by_hand_in_a_loop_that_cannot_be_left_ends(tracker: LoaderTracker) -> None:
    first = DataLoader(_data(), batch_size=4)
    batches = iter(first)
    assert [len(next(batches)[0]) for _ in (1, 2)] == [4, 4]
    assert next(batches, None) is None


def test_another_batch_size_holds_for_the_loader_of_each_epoch() -> None:
    """It is made on the same line of a data set like the first; an evaluation's keeps its own."""
    patches, sizes = PatchSet(), []
    tracker = LoaderTracker(override=LoaderOverride(0, 20))
    tracker.install(patches)
    try:
        for _ in range(2):
            sizes.append(DataLoader(_data(), batch_size=4).batch_size)
            sizes.append(DataLoader(_data(), batch_size=5).batch_size)
        for data in (_data(), TensorDataset(torch.zeros(7, 1))):
            sizes.append(DataLoader(data, batch_size=6).batch_size)
    finally:
        patches.restore()
    assert sizes == [20, 5, 20, 5, 6, 6]


def test_one_of_another_data_set_on_its_line_keeps_its_own() -> None:
    patches, sizes = PatchSet(), []
    tracker = LoaderTracker(override=LoaderOverride(0, 20))
    tracker.install(patches)
    try:
        for data in (_data(), TensorDataset(torch.zeros(7, 1))):
            sizes.append(DataLoader(data, batch_size=4).batch_size)
    finally:
        patches.restore()
    assert sizes == [20, 4]
