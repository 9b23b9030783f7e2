"""Which samples stand for all batches where those vary in shape."""

from __future__ import annotations

import dataclasses

import pytest

from trainfit.plan.runs.batches import varying_shapes
from trainfit.plan.runs.tracing import Trace
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.runs.spec import AS_WRITTEN
from trainfit.results.runs.trace import LoaderInfo, SampleOverride, SampleScan, TraceOutcome

SCAN = SampleScan(100, 100, 3, 7, 500, 1000)
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
