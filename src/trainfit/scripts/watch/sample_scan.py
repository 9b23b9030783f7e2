"""Sizes of a data set's samples where batches differ in shape: the median, the longest."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader

from trainfit.results.runs.trace import SampleOverride, SampleScan
from trainfit.torch_private import data_loading as private

#: Seconds for looking at samples, and samples at most.
_BUDGET_S: Final = 5.0
_MOST: Final = 100_000
#: Samples of a usual batch: its longest is what the others are padded to.
_USUAL: Final = 32
#: Two batches whose elements differ by less than this share are of one size.
_ALIKE: Final = 0.02
#: Containers within one another that are looked into.
_DEPTH: Final = 6


def scan_samples(loader: DataLoader[Any]) -> SampleScan:
    """Look at the loader's samples, in random order, as many as a few seconds allow.

    They are made as a worker would make them, and again by :func:`repeated`: random transforms
    draw by a seed of each sample's own.
    """
    if private.dataset_kind(loader) != private.INDEXED or not private.makes_batches(loader):
        return SampleScan(reason="its data set cannot be indexed")
    keys = _keys(loader)
    if not keys or not all(isinstance(key, int | np.integer) for key in keys):
        return SampleScan(reason="its data set is not indexed by integers")
    order = {int(key): place for place, key in enumerate(keys)}
    random.Random(0).shuffle(keys)
    found: list[tuple[int, int]] = []
    deadline = time.monotonic() + _BUDGET_S
    with _own_randomness():
        for key in keys:
            if found and time.monotonic() > deadline:
                break
            try:
                found.append((elements(_sample(loader, int(key))), int(key)))
            except Exception as error:  # the user's data set: whatever it raises
                return SampleScan(reason=f"sample {key} failed ({type(error).__name__}: {error})")
    in_order = sorted(found, key=lambda each: order[each[1]])
    found.sort()
    (median, typical), (most, longest) = found[len(found) // 2], found[-1]
    fill, padded = _longest_of_a_batch(in_order)
    pads = _pads(loader, typical, longest)
    return SampleScan(
        looked_at=len(found),
        samples=len(keys),
        typical=typical,
        longest=longest,
        typical_elements=median,
        longest_elements=most,
        padded=padded if pads else None,
        padded_elements=fill if pads else 0,
    )


def _longest_of_a_batch(found: list[tuple[int, int]]) -> tuple[int, int]:
    """The longest sample of a usual batch, the median of all: of ``found``, elements and keys in
    an epoch's order, in which a sampler may have put samples of like size together."""
    batches = [found[at : at + _USUAL] for at in range(0, len(found), _USUAL)]
    full = [each for each in batches if len(each) == _USUAL] or batches
    return statistics.median_high(max(batch) for batch in full)


def _pads(loader: DataLoader[Any], short: int, long: int) -> bool:
    """Is a batch of both samples as large as one of the longer alone?"""
    with _own_randomness():
        try:
            mixed = elements(loader.collate_fn([_sample(loader, key) for key in (short, long)]))
            alone = elements(loader.collate_fn([_sample(loader, key) for key in (long, long)]))
        except Exception:  # the user's collate function: it may want more than two, or one size
            return False
    return abs(mixed - alone) <= _ALIKE * alone


def repeated(loader: DataLoader[Any], sample: SampleOverride, samples: int) -> Any:
    """A batch of so many samples, made of those that ``sample`` says, as ``loader`` would collate
    it."""
    with _own_randomness():
        first = _sample(loader, sample.key)
        batch = [first, *(copy.copy(first) for _ in range(samples - 1))]
        if sample.padded is not None and samples > 1:
            batch[-1] = _sample(loader, sample.padded)
        batch = loader.collate_fn(batch)
    return private.pinned(batch) if loader.pin_memory else batch


def elements(sample: Any, depth: int = _DEPTH) -> int:
    """Numbers in a sample: elements of tensors and arrays, letters of texts, numbers of lists."""
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if isinstance(sample, np.ndarray):
        return int(sample.size)
    if isinstance(sample, str | bytes):
        return len(sample)
    if isinstance(sample, Mapping):
        parts: Any = sample.values()
    elif isinstance(sample, list | tuple):
        if sample and all(type(each) in (int, float, bool) for each in sample):
            return len(sample)
        parts = sample
    elif hasattr(sample, "size") and isinstance(sample.size, tuple):  # a PIL image
        return int(np.prod(sample.size))
    elif hasattr(sample, "__dict__") and not isinstance(sample, type):
        parts = list(vars(sample).values())
    else:
        return 1
    return sum(elements(part, depth - 1) for part in parts) if depth else 1


def _keys(loader: DataLoader[Any]) -> list[Any]:
    """What the data set is indexed with in an epoch."""
    batches = itertools.chain.from_iterable(loader.batch_sampler or ())
    return list(dict.fromkeys(itertools.islice(batches, _MOST)))  # some go on for ever


def _sample(loader: DataLoader[Any], key: int) -> Any:
    random.seed(key)
    np.random.seed(key % (1 << 32))
    torch.default_generator.manual_seed(key)
    return private.MapFetcher(loader.dataset, True, list, False).fetch([key])[0]


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    """What is drawn meanwhile leaves the script's own random numbers as they were."""
    python, numpy, own = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(own)
