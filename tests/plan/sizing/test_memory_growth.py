"""How much memory may stay behind with each step before no batch size is recommended."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trainfit.plan.sizing.memory_model import Growth, MemoryModel
from trainfit.results.runs.steps import StepPattern

GIB = 1 << 30
#: Of a GPU of 24 GiB, 2 GiB are left free.
JUDGE = cast(MemoryModel, SimpleNamespace(capacity_bytes=24 * GIB, usable_bytes=22 * GIB))
LOSSES = StepPattern("growing", 6, (), (), growth_bytes_per_step=512)


def replayed(*peaks: int) -> Any:
    return SimpleNamespace(step_peaks=tuple((peak, 0) for peak in peaks))


@pytest.mark.parametrize(("growth", "fits"), [(512, True), (2_147, True), (2_148, False)])
def test_a_million_steps_stay_within_the_headroom(growth: int, fits: bool) -> None:
    """2 GiB over a million steps are 2147.48 bytes each."""
    found = Growth.of(dataclasses.replace(LOSSES, growth_bytes_per_step=growth), JUDGE)
    assert (not found.unfit) == fits
    assert fits or "while memory grows (2.1 KiB with each step)" in found.unfit


def test_what_is_kept_of_a_larger_batch_is_larger() -> None:
    growth = Growth.of(LOSSES, JUDGE)
    assert not growth.unfit_at(replayed(1000, 9000, 9512))
    assert "(100 KiB with each step)" in growth.unfit_at(replayed(1000, 9000, 9000 + 102_400))


def test_memory_that_settles_or_grows_with_calls_bounds_nothing() -> None:
    settled = Growth.of(StepPattern("settled", 3, (), ()), JUDGE)
    cache = dataclasses.replace(LOSSES, growth_bytes_per_step=GIB, unit="model call")
    for growth in (settled, Growth.of(cache, JUDGE)):
        assert not growth.unfit and not growth.unfit_at(replayed(1, GIB))
