"""What workers copy: open files, random generators, data sets that each of them iterates whole."""

from __future__ import annotations

import dataclasses
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from trainfit.results.runs.watched import NO_COPIES, WorkerCopies
from trainfit.torch_private.data_loading import has_worker_init
from trainfit.watch.recorder.first_batches import FirstBatches, FirstLook, compared
from trainfit.watch.recorder.worker_hooks import bytes_of


class Holder:
    """A data set that holds what it is given."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


@pytest.fixture(autouse=True)
def global_generators() -> Any:
    """Left as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def look(worker: int, dataset: Any, make: Any = lambda: None, **words: Any) -> FirstBatches:
    """At the first batch of a worker with this copy of the data set."""
    first = FirstLook(worker, dataset, iterates=False)
    first.made(make(), 0)
    assert first.is_over
    return first.found


def seeded(seed: int) -> Holder:
    return Holder(rng=np.random.default_rng(seed), other=random.Random(seed))


def drawing(worker: int, dataset: Holder) -> FirstBatches:
    return look(worker, dataset, dataset.rng.random)


def test_a_generator_that_is_copied_into_workers() -> None:
    found = compared([drawing(0, seeded(0)), drawing(1, seeded(0))])
    assert (found.by_workers, found.by_epochs, found.workers) == (("dataset.rng",), (), 2)


def test_generators_of_each_workers_own_are_none_of_them() -> None:
    assert compared([drawing(0, seeded(0)), drawing(1, seeded(1))]).by_workers == ()


def test_a_generator_that_nobody_draws_from_is_none_of_them() -> None:
    assert compared([look(0, seeded(0)), look(1, seeded(0))]).by_workers == ()


def test_one_worker_that_begins_alike_in_each_epoch() -> None:
    found = compared([drawing(0, seeded(0)), drawing(0, seeded(0))])
    assert (found.by_workers, found.by_epochs) == ((), ("dataset.rng",))


def test_a_global_generator_that_each_worker_seeds_alike() -> None:
    def worker(number: int) -> FirstBatches:
        np.random.seed(5)
        return look(number, Holder(), np.random.random)

    assert compared([worker(0), worker(1)]).by_workers == ("numpy.random",)


def test_what_is_open_before_the_first_sample_is_told(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x")
    dataset = Holder(file=None)
    first = FirstLook(0, dataset, iterates=False)
    with path.open("rb") as dataset.file:  # at the first sample, in the worker
        first.made(None, 0)
        assert first.found.handles == {}
        assert "dataset.file" in look(0, dataset).handles
        own = FirstLook(0, dataset, iterates=False, inherited=False)
        assert own.found.handles == {}
    assert look(0, dataset).handles == {}  # it is closed
    assert look(0, Holder(text=io.StringIO("x"))).batches == ()


def iterated(worker: int, *batches: Any, nbytes: int = 4) -> FirstBatches:
    first = FirstLook(worker, Holder(), iterates=True)
    for each in batches:
        first.made(each, nbytes)
    first.ended()
    return first.found


def test_two_workers_that_give_the_same() -> None:
    batches = [torch.arange(4) + n for n in range(3)]
    assert compared([iterated(0, *batches), iterated(1, *batches)]).same_batches
    assert not compared([iterated(0, *batches), iterated(1, *batches[1:])]).same_batches
    # The same worker in a second epoch, constant data, and batches too large to be hashed.
    assert not compared([iterated(0, *batches), iterated(0, *batches)]).same_batches
    alike = [torch.zeros(4)] * 3
    assert not compared([iterated(0, *alike), iterated(1, *alike)]).same_batches
    large = [iterated(n, *batches, nbytes=1 << 30) for n in range(2)]
    assert not compared(large).same_batches


def test_a_worker_without_a_sample_is_counted_once() -> None:
    parts = [iterated(0, 1, 2), iterated(1), iterated(1), iterated(2, 3)]
    found = compared(parts)
    assert (found.empty, found.workers) == (1, 3)


def test_without_workers_there_is_nothing() -> None:
    assert compared([]) == NO_COPIES == WorkerCopies()
    assert dataclasses.asdict(compared([look(0, Holder())]))["workers"] == 1


class TellsOfInit(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return int(has_worker_init())


@pytest.mark.parametrize("init", [None, print])
def test_a_worker_knows_whether_it_has_an_init_function(init: Any) -> None:
    """What that opened is the worker's own."""
    loader = DataLoader(TellsOfInit(), num_workers=1, worker_init_fn=init)
    assert [int(each) for each in loader] == [int(init is not None)] * 2
    assert has_worker_init()  # no worker: nothing is said


def test_nothing_is_over_before_it_is_all_found() -> None:
    """A thread writes what was found once it is over."""
    seen: list[tuple[bool, bool]] = []

    class Watched(FirstLook):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name in ("found", "_made") and hasattr(self, "found"):
                seen.append((self.is_over, bool(self.found.generators)))

    dataset = seeded(0)
    first = Watched(0, dataset, iterates=False)
    dataset.rng.random()
    first.made(None, 0)
    assert seen[-1] == (True, True) and (True, False) not in seen


@pytest.mark.parametrize(
    ("batch", "nbytes"),
    [
        ([torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)], 160),
        ({"points": np.zeros((4, 8), dtype=np.float32)}, 128),
        # Objects and lists are pickled, which costs more than a tensor of their size.
        ([Holder(points=np.zeros(8), label=3), Holder(points=np.zeros(8), label=4)], 128),
        ([[1] * 1000, [2] * 1000], 4000),
        (Holder(image=torch.zeros(8), name="a"), 32),
        (["a.png", 3, None, b"x"], 0),
    ],
)
def test_the_size_of_a_batch_counts_what_is_pickled(batch: Any, nbytes: int) -> None:
    assert bytes_of(batch) == nbytes


def test_the_size_of_a_batch_runs_nobodys_code() -> None:
    class Lazy:
        @property
        def points(self) -> Any:
            raise AssertionError

        def __getattr__(self, name: str) -> Any:
            raise AssertionError

    assert bytes_of([Lazy(), object()]) == 0
