"""Epochs that are cut short: of which DataLoaders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from trainfit.results.runs.trace import LoaderCut
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
