"""What a DataLoader was seen to give: samples and shapes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from trainfit.results.runs.trace import LoaderInfo, LoaderOverride, SampleOverride
from trainfit.scripts.dataloader import LoaderTracker
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.data_loading import TORCHDATA, workers_of

TEXTS = [torch.ones(length, dtype=torch.long) for length in (5, 3, 9, 1, 7, 2)]


def collate(texts: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(texts, batch_first=True)


@contextlib.contextmanager
def tracking(**options: Any) -> Iterator[LoaderTracker]:
    tracker, patches = LoaderTracker(**options), PatchSet()
    tracker.install(patches)
    try:
        yield tracker
    finally:
        patches.restore()


def watched(make: Callable[[], DataLoader[Any]], **options: Any) -> tuple[LoaderInfo, list[Any]]:
    """One epoch under a tracker."""
    with tracking(**options) as tracker:
        loader = make()
        batches = list(loader)
        found = tracker.feeding()
    assert found is not None
    return found, batches


_construct = DataLoader.__init__


class Stateful(DataLoader[Any]):
    """As torchdata's: with neither the constructor nor the iterators of PyTorch's."""

    def __init__(self, data: Any, batch_size: int = 1) -> None:
        _construct(self, data, batch_size)

    def _get_iterator(self) -> Any:
        return _SingleProcessDataLoaderIter(self)

    def __iter__(self) -> Any:
        return self._get_iterator()


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


def test_samples_of_a_loader_that_only_its_loop_holds() -> None:
    with tracking() as tracker:
        for seen, _ in enumerate(DataLoader(TEXTS, 2, collate_fn=collate)):  # type: ignore[arg-type]
            if seen == 2:
                found = tracker.scan(5.0)
        after = tracker.scan(5.0)
    assert found is not None and found.longest_elements == 9
    assert after is None  # it is not kept any longer than the loop


class Broken:
    """A sampler that works for one epoch."""

    def __iter__(self) -> Iterator[Any]:
        yield from [[0, 1], [2, 3]]
        raise RuntimeError("set_epoch() first")


def test_a_sampler_that_fails_is_said() -> None:
    with tracking() as tracker:
        loader = DataLoader(torch.zeros(4, 3), batch_sampler=Broken())  # type: ignore[arg-type]
        next(iter(loader))
        found = tracker.scan(5.0)
    assert found is not None and "cannot be looked at (RuntimeError: set_epoch()" in found.reason


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
    with tracking() as tracker:
        assert tracker.sample_s() is None
        list(DataLoader(Slow(0.01), 2, num_workers=workers))
    sample_s = tracker.sample_s()
    assert sample_s is not None and sample_s >= 0.01
    assert fetch._MapDatasetFetcher.fetch.__qualname__ == "_MapDatasetFetcher.fetch"


def test_loaders_are_shut_down_and_can_be_iterated_again() -> None:
    with tracking() as tracker:
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


class Shard:
    """One process's batches of several processes', as Accelerate's ``BatchSamplerShard``."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler, self.num_processes = batch_sampler, 2
        self.batch_size, self.drop_last = batch_sampler.batch_size, False

    def __iter__(self) -> Iterator[Any]:
        yield from list(self.batch_sampler)[::2]


def test_an_epoch_of_a_shard_is_the_process_s_own() -> None:
    made: list[DataLoader[Any]] = []

    def rebuilt() -> DataLoader[Any]:
        made.append(DataLoader(torch.zeros(9, 3), 2))  # type: ignore[arg-type]
        return DataLoader(made[0].dataset, batch_sampler=Shard(made[0].batch_sampler))  # type: ignore[arg-type]

    found, batches = watched(rebuilt)
    assert (found.samples, found.data_set, found.batch_size) == (5, 9, 2)
    assert found.index == 0  # the user's own
    assert sum(map(len, batches)) == 5


class Split:
    """Batches of another batch sampler, each in halves, as Opacus' ``BatchSplittingSampler``."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return 2 * len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.sampler:
            yield from (batch[: len(batch) // 2], batch[len(batch) // 2 :])


class Drawn:
    """Batches of indices that are drawn, with no number of samples."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 3, 5, 7], [1, 2, 4, 8])


def test_a_sampler_of_batches_that_are_split_does_not_count_samples() -> None:
    data = torch.zeros(9, 3)
    found, batches = watched(lambda: DataLoader(data, batch_sampler=Split(Drawn())))  # type: ignore[arg-type]
    assert (found.samples, found.data_set) == (9, 9)
    assert [len(each) for each in batches] == [2, 2, 2, 2]


@pytest.mark.parametrize(("keep", "indexed", "started"), [(0, 1, 1), (0, 0, 3), (1, 1, 3)])
def test_a_simulated_run_starts_no_more_workers_than_there_are_cores(
    keep: int, indexed: int, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 workers on two cores fetched 24 batches for the three that were simulated. What is not
    indexed may be split by the number of workers, and what is measured is measured as it is."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    with tracking(keep=bool(keep)) as tracker:
        loader: DataLoader[Any] = DataLoader(
            TEXTS if indexed else Stream(),  # type: ignore[arg-type]
            batch_size=2,
            num_workers=3,
            collate_fn=collate,
        )
        batches = iter(loader)
        first = next(batches)
        assert len(workers_of(batches)) == started
        tracker.shut_down()
    info = tracker.feeding()
    assert len(first) == 2 and loader.num_workers == 3
    assert info is not None and info.settings.num_workers == 3


def test_torchdatas_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(TORCHDATA)
    monkeypatch.setattr(Stateful, "__module__", TORCHDATA)
    module.Stateful = Stateful  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, TORCHDATA, module)
    original = Stateful._get_iterator
    data = torch.zeros(7, 3)
    found, batches = watched(lambda: Stateful(data, 2))
    assert (found.batch_size, found.samples, found.fed) == (2, 7, (2, 2, 2, 1))
    assert [len(each) for each in batches] == [2, 2, 2, 1]
    _, batches = watched(lambda: Stateful(data, 2), override=LoaderOverride(0, 3))
    assert [len(each) for each in batches] == [3, 3, 1]
    assert Stateful._get_iterator is original


def test_text_that_is_given_once_more_is_known() -> None:
    def again(rows: list[Any]) -> list[bool]:
        found: list[bool] = []
        with tracking() as tracker:
            tracker.on_batch = lambda batch: found.append(batch.is_again)
            for _ in DataLoader(rows, batch_size=2, collate_fn=list):  # type: ignore[arg-type]
                pass
        return found

    def text(*words: str) -> list[Any]:
        return [{"prompt": each, "length": [1, 2.0, None]} for each in words]

    assert again(text("a", "b", "a", "b", "c", "d")) == [False, True, False]
    assert again([torch.ones(2)] * 4) == [False, False]  # a batch of tensors is not compared


@pytest.mark.parametrize(
    ("sizes", "peeked", "expected"),
    [
        ((2, 14), None, 2),  # labelled samples and seven times as many others
        ((14, 2), None, 2),
        ((4, 6), None, 6),  # none is a multiple of the other: the last of the step's
        ((3, 3), None, 3),
        ((8,), 4, 8),  # that of a test set was looked at once
        ((1, 8), None, 8),
    ],
)
def test_of_loaders_in_unequal_shares_the_least_counts(
    sizes: tuple[int, ...], peeked: int | None, expected: int
) -> None:
    with tracking() as tracker:
        loaders = [DataLoader(list(range(100)), size) for size in sizes]
        iterators = [iter(loader) for loader in loaders]
        if peeked is not None:
            test = DataLoader(list(range(100)), peeked)
            next(iter(test))
        for _ in range(3):
            for each in iterators:
                next(each)
            tracker.note_step()
        found = tracker.feeding()
    assert found is not None and found.batch_size == expected


def test_the_loop_over_a_loader_tells_whatever_its_share() -> None:
    with tracking() as tracker:
        few, many = DataLoader(list(range(100)), 2), DataLoader(list(range(100)), 14)
        others = iter(few)
        for _ in many:
            next(others)
            tracker.note_step()
        found = tracker.feeding()
    assert found is not None and found.batch_size == 14


class InGroups(torch.utils.data.Sampler[int]):
    """As TRL's: each prompt as many times in a row as it gets completions."""

    mini_repeat_count = 4

    def __iter__(self) -> Iterator[int]:
        return iter([at // 4 for at in range(32)])

    def __len__(self) -> int:
        return 32


def test_groups_of_samples_are_told() -> None:
    data = TensorDataset(torch.zeros(8, 1))
    assert watched(lambda: DataLoader(data, batch_size=8, sampler=InGroups()))[0].group == 4
    assert watched(lambda: DataLoader(data, batch_size=8, shuffle=True))[0].group == 1
