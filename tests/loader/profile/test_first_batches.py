"""The first batches of a workload, as the process that measures storage makes them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from trainfit.loader.measure.storage_cost import _Session
from trainfit.loader.measure.workload import Workload


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(10))


@pytest.mark.parametrize(
    ("dataset", "sizes"),
    [(TensorDataset(torch.arange(10)), [4, 4, 2]), (Stream(), [4, 4, 4])],  # a stream's end shows
)
def test_batches_are_made_of_the_samplers_indices_and_again(
    dataset: Dataset[Any], sizes: list[int]
) -> None:
    session = _Session(Workload.of(dataset, 4))
    session.first(60)
    assert [len(indices) for indices in session.indices] == sizes
    session.until = time.monotonic() + 60
    assert len(session.again().seconds) == len(sizes)
