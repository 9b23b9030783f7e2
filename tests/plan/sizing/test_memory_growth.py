"""How much memory may stay behind with each step before no batch size is recommended."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from trainfit.memory.growth import step_pattern
from trainfit.plan.sizing.memory_model import Growth, MemoryModel
from trainfit.report.steps import pattern_lines
from trainfit.results.runs.steps import StepPattern
from trainfit.results.text import count
from trainfit.simgpu.session import Simulation

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


def test_a_training_by_hand_counts_backward_passes() -> None:
    """An optimizer that is none of PyTorch's: its losses grow as those of any training do."""
    with Simulation("T4") as simulation:
        weight, kept = torch.zeros(64, device="cuda", requires_grad=True), []
        for _ in range(6):
            kept.append(weight.square().sum())
            kept[-1].backward()
            with torch.no_grad():
                weight -= weight.grad
            simulation.end_step()
        pattern = step_pattern(simulation.recording, reserved_bytes=0)
    assert (pattern.unit, pattern.course) == ("backward pass", "growing")
    assert count(pattern.steps, pattern.unit) == "6 backward passes"
    assert "with each backward pass" in pattern_lines(pattern)[0]
