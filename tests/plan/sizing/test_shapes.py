"""Which samples stand for all batches where those vary in shape."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trainfit.plan.runs.batches import VaryingShapes, unknown_batch, varying_shapes
from trainfit.plan.runs.tracing import Trace
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.runs.spec import AS_WRITTEN
from trainfit.results.runs.trace import LoaderInfo, SampleOverride, SampleScan, TraceOutcome

SCAN = SampleScan(100, 100, 3, 7, 500, 1000, varying=("",), largest=(7,))
LOADER = LoaderInfo(0, 8, 100, 3, LoaderSettings(0), "list", None, varies=True, scan=SCAN)


def timed_with(scan: SampleScan) -> tuple[SampleOverride | None, bool]:
    """The sample that steps are timed with; are they those of memory's runs?"""
    loader = dataclasses.replace(LOADER, scan=scan)
    found = varying_shapes(Trace(TraceOutcome("finished", 3, 1.0, loader=loader), None, ""))
    assert found is not None
    shorter = None if scan.padded is None else 3  # one that is padded to the others
    assert found.sized(AS_WRITTEN).sample == SampleOverride(0, 7, shorter)
    return found.typical, found.timed(AS_WRITTEN) == found.sized(AS_WRITTEN)


@pytest.mark.parametrize(
    ("padded", "elements", "key"),
    [(None, 0, 3), (5, 850, 5), (5, 950, 7)],
    ids=["the median", "what batches are padded to", "about the longest: no runs of its own"],
)
def test_the_sample_that_steps_are_timed_with(padded: int | None, elements: int, key: int) -> None:
    scan = dataclasses.replace(SCAN, padded=padded, padded_elements=elements)
    shorter = None if padded is None else 3
    assert timed_with(scan) == (SampleOverride(0, key, shorter), key == 7)


def shapes(**changes: Any) -> VaryingShapes | None:
    loader = dataclasses.replace(LOADER, **changes)
    return varying_shapes(Trace(TraceOutcome("finished", 3, 1.0, loader=loader), None, ""))


@pytest.mark.parametrize(
    ("scan", "reason"),
    [
        (SampleScan(100, 100), None),
        (SampleScan(32, 9000, is_stacked=True), None),
        (None, None),
        (SampleScan(100, 9000), ""),
        (SampleScan(reason="its data set is iterable"), "its data set is iterable"),
    ],
    ids=["all of one size", "stacked", "not looked at", "in part", "cannot be looked at"],
)
def test_what_is_said_where_batches_seen_are_alike(
    scan: SampleScan | None, reason: str | None
) -> None:
    found = shapes(varies=False, scan=scan)
    assert (None if found is None else found.reason) == reason
    # The run as it is written is the rule's.
    assert found is None or (not found.matter and found.sized(AS_WRITTEN) == AS_WRITTEN)


def test_batches_that_differ_without_a_sample_that_tells() -> None:
    gone, alike = shapes(scan=None), shapes(scan=SampleScan(100, 100))
    assert gone is not None and gone.matter and "no longer existed" in gone.reason
    assert alike is not None and "differ only after that" in alike.reason


@pytest.mark.parametrize(
    ("batch_size", "fed", "why"),
    [
        (None, (36, 17, 21), "the sampler decides how many samples a batch has (17 to 36 in"),
        (None, (32, 32), "no DataLoader with a batch size fed the first step"),
        (None, (), "no DataLoader with a batch size fed the first step"),
    ],
)
def test_why_there_is_no_batch_size(batch_size: int | None, fed: tuple[int, ...], why: str) -> None:
    info = LoaderInfo(0, batch_size, 100, 3, LoaderSettings(0), "list", None, fed=fed)
    assert why in unknown_batch(Trace(TraceOutcome("finished", 3, 1.0, loader=info), None, ""))


@pytest.mark.parametrize(
    ("status", "fed", "why"),
    [
        ("finished", (36, 17), "the DataLoader no longer existed"),
        ("interrupted", (36, 17), "the run stopped before the samples were looked at"),
        ("interrupted", (32, 32), None),
    ],
)
def test_samples_that_nobody_looked_at(status: Any, fed: tuple[int, ...], why: str | None) -> None:
    info = LoaderInfo(0, None, 100, 3, LoaderSettings(0), "list", None, fed=fed)
    found = varying_shapes(Trace(TraceOutcome(status, 3, 1.0, loader=info), None, ""))
    assert (found is None) == (why is None)
    assert found is None or (why or "") in found.reason
