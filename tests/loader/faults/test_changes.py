"""Data sets that are changed by the making of their samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from trainfit.loader.measure.workload import Workload
from trainfit.loader.preflight import changes, check_changes


class Images(Dataset[Any]):
    """Images in an array, of which a sample is made by ``make``."""

    def __init__(self, make: Callable[[Images, int], Any]) -> None:
        self.images: Any = np.ones((8, 3, 6, 6), dtype=np.float32)
        self.tensors = torch.ones(8, 36)
        self.cache = np.zeros((8, 36), dtype=np.float32)
        self.visits = np.zeros(8, dtype=np.int64)
        self.make = make

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.make(self, index)


def _in_place(data: Images, index: int) -> Any:
    image = data.images[index]
    image -= 0.5
    return image


def _of_tensor(data: Images, index: int) -> Any:
    return data.tensors[index].mul_(0.5)


def _copied(data: Images, index: int) -> Any:
    image = data.images[index].copy()
    image -= 0.5
    return image


def _cached(data: Images, index: int) -> Any:
    data.cache[index] = data.tensors[index].numpy()
    data.visits[index] += 1
    return torch.from_numpy(data.cache[index])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (_in_place, ("images", 108)),
        (_of_tensor, ("tensors", 36)),
        (_copied, None),
        (_cached, None),
    ],
)
def test_a_sample_that_changes_the_data_set(
    make: Callable[[Images, int], Any], told: tuple[str, int] | None
) -> None:
    found = changes(Images(make))
    assert (found and (found[0].rpartition(".")[2], found[1])) == told


class Drifting(Images):
    """As scripts have it."""

    def __getitem__(self, index: int) -> Any:
        image = self.images[index]
        image -= 0.5  # this line
        return image


def test_the_line_is_told_and_the_data_stays_as_it_was() -> None:
    data = Drifting(_copied)
    (finding,) = check_changes(Workload.of(data))
    assert finding.kind == "data_changed" and "images" in finding.title
    assert finding.place is not None
    with open(__file__, encoding="utf-8") as file:
        assert "this line" in file.readlines()[finding.place.line - 1]
    assert (data.images == 1).all()
