"""Generators that workers copy with their state: the same numbers in each worker, in each epoch."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainfit.loader.measure.probe_runs import HARMLESS, UNSAFE, bounds_of
from trainfit.loader.measure.workload import Workload
from trainfit.loader.sharding import check_generators
from trainfit.results.findings import Finding

RNG = np.random.default_rng(0)


class Noisy(Dataset[Any]):
    """Draws one number for each sample, with what it holds."""

    def __init__(self, draw: Callable[[Any], float], **held: Any) -> None:
        self.draw = draw
        self.__dict__.update(held)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), self.draw(self)])


class Lazy(Noisy):
    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rng is None:
            self.rng = np.random.default_rng(torch.initial_seed())
        return torch.tensor([index, self.rng.random()])


class OfModule(Noisy):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, RNG.random()])


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __iter__(self) -> Any:
        while True:
            yield torch.tensor([self.rng.random()])


def by_number(worker: int) -> None:
    np.random.seed(worker)


def by_constant(worker: int) -> None:
    np.random.seed(0)


def by_seed(worker: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)


def fault(dataset: Any, **options: Any) -> Finding | None:
    found = check_generators(Workload(DataLoader(dataset, 4, **options)))
    return found[0] if found else None


@pytest.mark.parametrize(
    ("dataset", "path"),
    [
        (Noisy(lambda own: own.rng.random(), rng=np.random.default_rng(0)), "dataset.rng"),
        (Noisy(lambda own: own.rng.rand(), rng=np.random.RandomState(0)), "dataset.rng"),
        (Noisy(lambda own: own.rng.random(), rng=random.Random(0)), "dataset.rng"),
        (
            Noisy(
                lambda own: float(torch.rand(1, generator=own.rng)),
                rng=torch.Generator().manual_seed(0),
            ),
            "dataset.rng",
        ),
        (OfModule(float), "RNG"),
        (Stream(), "dataset.rng"),
    ],
)
def test_each_worker_draws_the_same(dataset: Any, path: str) -> None:
    found = fault(dataset)
    assert found is not None and found.title.startswith(f"{path} is copied into the workers")
    assert "each worker" in found.title and "each epoch again" in found.title
    assert "torch.initial_seed()" in found.fix.action and found.kind == "generator_copied"


@pytest.mark.parametrize(
    ("init", "says"), [(by_number, "each epoch draws"), (by_constant, "each worker draws")]
)
def test_a_worker_init_fn_that_seeds_alike(init: Callable[[int], None], says: str) -> None:
    found = fault(Noisy(lambda own: np.random.rand()), worker_init_fn=init)
    assert found is not None and says in found.title and "worker_init_fn" in found.title


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Noisy(lambda own: np.random.rand()), {}),  # PyTorch seeds it
        (Noisy(lambda own: random.random()), {}),
        (Noisy(lambda own: float(torch.rand(1))), {}),
        (Noisy(lambda own: np.random.rand()), {"worker_init_fn": by_seed}),
        (Lazy(float, rng=None), {}),
        (Noisy(lambda own: 0.0, rng=np.random.default_rng(0)), {}),  # drawn from before, or never
        # Workers that stay go on with their numbers, and differ by the worker's.
        (Noisy(lambda own: np.random.rand()),
         {"worker_init_fn": by_number, "num_workers": 2, "persistent_workers": True}),
    ],
)  # fmt: skip
def test_no_false_alarm(dataset: Any, options: dict[str, Any]) -> None:
    assert fault(dataset, **options) is None


def test_it_bounds_no_run_but_what_is_advised() -> None:
    found = fault(Noisy(lambda own: own.rng.random(), rng=random.Random(0)))
    assert found is not None
    assert found.kind in UNSAFE and found.kind in HARMLESS
    assert bounds_of(found).workers is None


class Held(Dataset[Any]):
    def __init__(self) -> None:
        self.rng = None
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.rng is not None
        return torch.tensor([self.rng.random()])


def test_the_line_that_makes_it_is_named() -> None:
    found = fault(Held())
    assert found is not None and found.place is not None
    line = Path(__file__).read_text().splitlines()[found.place.line - 1]
    assert line.strip() == "self.rng = np.random.default_rng(0)"
