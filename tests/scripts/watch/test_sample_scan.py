"""A look at a data set's samples: which parts vary, and the largest batch they can make."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import trainfit
from trainfit.plan.runs.batches import varying_shapes
from trainfit.plan.runs.tracing import Trace
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.runs.trace import LoaderInfo, SampleOverride, SampleScan, TraceOutcome
from trainfit.scripts.samples import scan as scanning
from trainfit.scripts.samples.scan import repeated, scan_samples, shapes_of

TEXTS = [torch.ones(length, dtype=torch.long) for length in (5, 3, 9, 1, 7, 2)]


class Samples(Dataset[Any]):
    """``count`` of them, made by ``make``."""

    def __init__(self, make: Callable[[int], Any], count: int = 200) -> None:
        self._make, self._count = make, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(5, 3))


def boxes(index: int) -> torch.Tensor:
    """Few, and 300 in one of fifty images."""
    return torch.ones(300 if index % 50 == 49 else 2 + index % 5, 4)


def padded(parts: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(parts, batch_first=True)


def images_and_padded_boxes(samples: list[Any]) -> Any:
    images, each = zip(*samples, strict=True)
    return torch.stack(images), padded(list(each))


def images_and_all_boxes(samples: list[Any]) -> Any:
    """Ultralytics': the boxes of all images in one tensor."""
    images, each = zip(*samples, strict=True)
    return torch.stack(images), torch.cat(each)


def lists(samples: list[Any]) -> Any:
    """torchvision's: images and targets as they are."""
    return tuple(zip(*samples, strict=True))


def scan(loader: DataLoader[Any], seconds: float = 5.0) -> SampleScan:
    return scan_samples(loader, seconds)


def largest(loader: DataLoader[Any], samples: int) -> Any:
    """The batch of so many samples that memory is sized by."""
    info = LoaderInfo(0, 8, 100, 3, LoaderSettings(0), "list", None, scan=scan(loader))
    found = varying_shapes(Trace(TraceOutcome("finished", 3, 1.0, loader=info), None, ""))
    assert found is not None and found.longest is not None
    return repeated(loader, found.longest, samples)


# -- the largest batch ---------------------------------------------------------------------------


def test_boxes_count_although_an_image_has_a_thousand_times_their_numbers() -> None:
    data = Samples(lambda index: (torch.zeros(3, 64, 64), boxes(index)))
    found = scan(DataLoader(data, 4, shuffle=True, collate_fn=images_and_padded_boxes))
    assert (found.varying, found.longest_elements, found.longest % 50) == (("[1]",), 1200, 49)
    assert found.padded is not None
    made = largest(DataLoader(data, 4, collate_fn=images_and_padded_boxes), 6)
    assert made[1].shape == (6, 300, 4)


@pytest.mark.parametrize("collate", [images_and_all_boxes, lists])
def test_boxes_that_add_up_are_those_of_the_densest_batch(collate: Any) -> None:
    """Four images of 200 are dense: not all in a batch are, and one is at the least."""
    data = Samples(lambda index: (torch.zeros(3, 8, 8), boxes(index)))
    _, each = largest(DataLoader(data, 8, shuffle=True, collate_fn=collate), 8)
    count = sum(len(part) for part in each) if isinstance(each, tuple) else len(each)
    assert 300 < count <= 4 * 300 + 4 * 6


def test_a_sampler_that_puts_the_long_ones_together() -> None:
    order = sorted(range(200), key=lambda index: len(boxes(index)))
    loader = DataLoader(Samples(boxes), 4, sampler=order, collate_fn=torch.cat)
    assert largest(loader, 4).shape == (1200, 4)


def test_batches_of_samples_of_one_length() -> None:
    order = sorted(range(200), key=lambda index: len(boxes(index)))
    loader = DataLoader(Samples(boxes), 4, sampler=order)
    assert largest(loader, 4).shape == (4, 300, 4)


def test_batches_of_a_number_of_tokens() -> None:
    """Of at most 64: four texts of 16, but sixty-four of one."""
    lengths = [1] * 64 + [16] * 8
    batches = [list(range(64)), [64, 65, 66, 67], [68, 69, 70, 71]]
    loader = DataLoader(
        Samples(lambda index: torch.ones(lengths[index], 3), 72),
        batch_sampler=batches,
        collate_fn=padded,
    )
    assert largest(loader, 5).numel() == 64 * 3


def test_one_image_is_the_widest_and_another_the_highest() -> None:
    shapes = [(3, 20, 50), (3, 50, 20), (3, 30, 30)]
    loader = DataLoader(Samples(lambda index: torch.zeros(shapes[index % 3])), 4, collate_fn=list)
    made = largest(loader, 4)
    assert max(each.shape[1] for each in made) == max(each.shape[2] for each in made) == 50


def test_two_parts_of_which_each_has_its_longest() -> None:
    """Translation: the longest source has a short target."""
    pairs = [(torch.ones(9), torch.ones(2)), (torch.ones(3), torch.ones(8))]

    def both(samples: list[Any]) -> Any:
        return tuple(padded(list(part)) for part in zip(*samples, strict=True))

    made = largest(DataLoader(Samples(lambda index: pairs[index % 2]), 4, collate_fn=both), 4)
    assert [tuple(part.shape) for part in made] == [(4, 9), (4, 8)]


def test_a_data_set_that_gives_batches() -> None:
    assert largest(DataLoader(Samples(boxes), None), 1).shape == (300, 4)


# -- samples of one size -------------------------------------------------------------------------


def test_no_part_varies() -> None:
    found = scan(DataLoader(TensorDataset(torch.zeros(5000, 3)), 4, shuffle=True))
    assert (found.varying, found.is_stacked, found.looked_at) == ((), True, 32)


def test_what_varies_and_is_left_out_of_batches() -> None:
    data = Samples(lambda index: {"image": torch.zeros(3, 4, 4), "boxes": boxes(index)})
    loader = DataLoader(
        data, 4, collate_fn=lambda each: torch.stack([one["image"] for one in each])
    )
    assert scan(loader).varying == ()


@pytest.mark.parametrize("seconds", [60, 600])
def test_the_largest_of_many_batches_of_a_number_of_tokens(
    seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data set that is slow is not looked at whole: the batches are, that seem the largest."""
    lengths = sorted(random.Random(1).choices(range(20, 200), k=500))
    made: list[int] = []
    batches, at_once = [], 2000
    keys = list(range(500))
    while keys:
        count = sum(1 for at, key in enumerate(keys) if lengths[key] * (at + 1) <= at_once)
        batches.append([keys.pop(0) for _ in range(count)])
    batches[7].append(499)  # one that exceeds all others

    def sample(index: int) -> torch.Tensor:
        made.append(index)
        return torch.ones(lengths[index])

    monkeypatch.setattr(scanning, "stopwatch", lambda: lambda: float(len(made)))
    loader = DataLoader(Samples(sample, 500), batch_sampler=batches, collate_fn=padded)
    found = scan(loader, seconds)
    assert found.whole and not found.reason
    assert found.looked_at < 70 if seconds == 60 else found.looked_at == 500
    needs = [len(batch) * max(lengths[key] for key in batch) for batch in batches]
    rows = len(found.largest) * max(lengths[key] for key in found.largest)
    assert rows == max(needs) if seconds == 600 else rows >= 0.95 * at_once
    assert abs(found.typical_elements - 110) < 40, "the median is of those drawn by chance"


def slow(index: int) -> torch.Tensor:
    time.sleep(0.02)
    return torch.zeros(3)


def test_an_expensive_data_set_is_looked_at_in_part() -> None:
    loader = DataLoader(Samples(slow, 10_000), 4, shuffle=True, collate_fn=list)
    found = scan(loader, 0.2)
    assert 1 <= found.looked_at < 20 and found.samples == 10_000
    assert not found.is_stacked  # so the others may be of another size
    assert scan(DataLoader(Samples(slow, 10_000), 4, shuffle=True), 0.2).is_stacked


def test_a_stream_may_have_anything_but_where_samples_are_stacked() -> None:
    assert scan(DataLoader(Stream(), 2)) == SampleScan(is_stacked=True)
    assert "iterable" in scan(DataLoader(Stream(), 2, collate_fn=padded)).reason
    assert "iterable" in scan(DataLoader(Stream(), batch_size=1)).reason


# -- which samples, and what is not known ----------------------------------------------------------


def test_the_longest_sample_and_the_median() -> None:
    loader = DataLoader(TEXTS, 2, collate_fn=padded)  # type: ignore[arg-type]
    found = scan(loader)
    assert (found.looked_at, found.samples) == (6, 6)
    assert (found.longest, found.longest_elements) == (2, 9)
    assert (found.typical, found.typical_elements) == (0, 5)
    assert repeated(loader, SampleOverride(0, found.longest), 4).shape == (4, 9)
    # One of them is shorter: a mask of such a batch is not all ones.
    made = repeated(loader, SampleOverride(0, found.longest, found.typical), 4)
    assert made.sum(1).tolist() == [9, 9, 9, 5]
    assert repeated(loader, SampleOverride(0, found.longest, found.typical), 1).shape == (1, 9)


def joined(texts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(texts)


def test_the_sample_to_which_a_usual_batch_is_padded() -> None:
    """Lengths 1 to 320, shuffled: the longest of 32 is at about 31 of 32 parts of them."""
    texts = [torch.ones(1 + length * 7 % 320) for length in range(320)]
    found = scan(DataLoader(texts, 4, collate_fn=padded))  # type: ignore[arg-type]
    assert 300 <= found.padded_elements <= 320
    assert found.padded is not None and len(texts[found.padded]) == found.padded_elements
    assert found.typical_elements == 161
    # Where the sampler puts samples of like length together, it is the batch's own.
    alike = sorted(texts, key=len)
    found = scan(DataLoader(alike, 4, collate_fn=padded))  # type: ignore[arg-type]
    assert found.padded_elements == 192  # of ten times 32 samples, the sixth
    # Samples that are put one after the other are not padded.
    found = scan(DataLoader(texts, 4, collate_fn=joined))  # type: ignore[arg-type]
    assert found.padded is None


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
    found = scan(loader)
    assert scan(loader) == found
    assert repeated(loader, SampleOverride(0, found.longest), 3).shape == (
        3,
        found.longest_elements,
    )
    # The script's own random numbers go on as if nobody had looked.
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_a_batch_is_pinned_where_the_loader_pins() -> None:
    with trainfit.simulate("T4"):
        for pins in (True, False):
            loader = DataLoader(TensorDataset(torch.ones(4, 3)), 2, pin_memory=pins)
            (batch,) = repeated(loader, SampleOverride(0, 0), 2)
            assert batch.shape == (2, 3) and batch.is_pinned() == pins


class Bad(Crops):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise RuntimeError("no file")


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Bad(), 2, collate_fn=list), "cannot be looked at (RuntimeError: no file)"),
        (DataLoader({"a": 1}, sampler=["a"]), "not indexed by integers"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_looked_at_is_said(loader: DataLoader[Any], reason: str) -> None:
    assert reason in scan(loader).reason


def test_samples_that_fail_are_left_out() -> None:
    def make(index: int) -> torch.Tensor:
        if index % 2:
            raise RuntimeError("no file")
        return boxes(index)

    found = scan(DataLoader(Samples(make), 2, collate_fn=padded))
    assert (found.looked_at, found.samples, found.longest_elements) == (100, 200, 24)


@pytest.mark.parametrize(
    ("sample", "shapes"),
    [
        (torch.zeros(3, 4), {"": (3, 4)}),
        ({"ids": [1, 2, 3], "label": 0}, {"['ids'][]": (3,)}),
        (("a text", np.zeros((2, 2))), {"[0]": (6,), "[1]": (2, 2)}),
        ([torch.zeros(2), torch.zeros(3)], {"[]": (2,), "[*]": (5,), "[0]": (2,), "[1]": (3,)}),
        (3.0, {}),
        ([], {"[]": (0,)}),
    ],
)
def test_shapes_of_a_sample(sample: object, shapes: dict[str, tuple[int, ...]]) -> None:
    assert shapes_of(sample) == shapes


def test_a_rare_sample_is_found_by_the_size_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 2000 is huge, and the time is enough for twenty."""
    clock = itertools.count()
    passed = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: passed[0] + 1e-4 * next(clock))

    def read(index: int) -> torch.Tensor:
        passed[0] += 0.1
        return torch.ones(files[index][0].stat().st_size)

    files = [(tmp_path / f"{number}.txt", number % 2) for number in range(2000)]
    for number, (path, _) in enumerate(files):
        path.write_bytes(b"." * (500 if number == 1234 else 5 + number % 3))
    samples = Samples(read, len(files))
    samples.files = files  # type: ignore[attr-defined]
    scan = scan_samples(DataLoader(samples, 8, shuffle=True, collate_fn=padded), 2.0)
    assert scan.looked_at < 100
    assert (scan.longest, scan.longest_elements, scan.typical_elements) == (1234, 500, 6)
    assert scan.padded_elements < 10


class _Endless(torch.utils.data.Sampler[int]):
    """As StyleGAN2's, YOLOX's and Detectron2's: it goes on for ever, and has no length."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(self._count))


def test_a_sampler_without_a_length() -> None:
    """Its samples could not be looked at, and the first line could not tell of larger batches."""
    loader = DataLoader(TensorDataset(torch.rand(100, 3, 8, 8)), 16, sampler=_Endless(100))
    scan = scan_samples(loader, 2.0)
    assert (scan.reason, scan.varying, scan.samples, scan.tells_all) == ("", (), 100, True)
    varied = DataLoader(Samples(boxes), 16, sampler=_Endless(200), collate_fn=padded)
    found = scan_samples(varied, 2.0)
    assert found.varying and found.longest_elements == 1200
