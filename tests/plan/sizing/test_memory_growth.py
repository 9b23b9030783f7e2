"""How much memory may stay behind with each step before no batch size is recommended."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from trainfit.memory.growth import is_freed_by_epochs, step_pattern
from trainfit.plan.epoch_end import within_epochs
from trainfit.plan.sizing.memory_model import Growth, MemoryModel
from trainfit.plan.sizing.planned_job import PlannedJob
from trainfit.report.steps import pattern_lines
from trainfit.results.runs.recording import Recording
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


def test_what_ends_when_its_buffer_is_full_is_no_reason() -> None:
    """CycleGAN's 50 images, 66 MiB in all, left a plan without a batch size."""
    images = dataclasses.replace(LOSSES, growth_bytes_per_step=3 << 19, grows_by_bytes=66 << 20)
    growth = Growth.of(images, JUDGE)
    assert not growth.unfit and growth.is_large
    # Of 8 images a step, as many steps' are kept.
    assert not growth.unfit_at(replayed(0, 8 * (3 << 19)))
    assert "(100 MiB with each step)" in growth.unfit_at(replayed(0, 100 << 20))
    endless = dataclasses.replace(images, grows_by_bytes=None)
    large = dataclasses.replace(images, grows_by_bytes=3 * GIB)
    for pattern in (endless, large):
        assert "(1.5 MiB with each step)" in Growth.of(pattern, JUDGE).unfit
    assert not Growth.on(large, 4 * GIB).unfit and Growth.on(large, 2 * GIB).unfit


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


def kept_outputs(epochs: int, *, frees: bool) -> Recording:
    """A training that keeps what its model gives, two steps an epoch."""
    with Simulation("T4") as simulation:
        model = torch.nn.Linear(512, 512).cuda()
        optimizer, outputs = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(epochs):
            for _ in range(2):
                outputs.append(model(torch.ones(512, 512, device="cuda")))
                optimizer.zero_grad()
                outputs[-1].sum().backward()
                optimizer.step()
                outputs[-1] = outputs[-1].detach()
            if frees:
                outputs.clear()
    return simulation.recording


@pytest.mark.parametrize("frees", [True, False])
def test_what_an_epochs_steps_keep_may_be_let_go_at_its_end(frees: bool) -> None:
    recording = kept_outputs(3, frees=frees)
    assert is_freed_by_epochs(recording, 2) is frees
    assert not is_freed_by_epochs(kept_outputs(2, frees=frees), 2)  # too few to tell
    pattern = dataclasses.replace(LOSSES, growth_bytes_per_step=1 << 20, steps_until_full=20_000)
    model = dataclasses.make_dataclass("Model", [("other_processes_bytes", int)], frozen=True)(7)
    model.__class__.capacity_bytes, model.__class__.usable_bytes = 24 * GIB, 22 * GIB
    trace = SimpleNamespace(recording=recording)
    coverage = SimpleNamespace(steps_per_epoch=106)
    job = dataclasses.make_dataclass(
        "Planned",
        ("pattern", "memory_model", "first", "runs", "batch", "infers", "recording", "sized"),
    )(
        pattern,
        model,
        SimpleNamespace(outcome=SimpleNamespace(coverage=coverage, loader=None)),
        SimpleNamespace(attempt=lambda batch, spec: trace),
        None,
        False,
        SimpleNamespace(makeup=None),
        lambda spec: spec,
    )
    found = within_epochs(cast(PlannedJob, job))
    if not frees:
        assert found is job
        return
    assert (found.pattern.freed_every, found.pattern.steps_until_full) == (106, None)
    assert found.pattern.grows_by_bytes == 100 << 20  # 6 steps are in the figures
    assert found.memory_model.other_processes_bytes == 7 + (100 << 20)
    assert not Growth.of(found.pattern, JUDGE).unfit
    (line,) = pattern_lines(found.pattern)
    assert "frees it" in line and "100 MiB more" in line
