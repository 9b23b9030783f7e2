"""Bounds of memory figures."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import trainfit  # noqa: E402
from trainfit.memory.capacity import (  # noqa: E402
    DeviceCapacity,
    bounds_of,
    context_parts,
    figures,
    least_capacity,
    reserved_bounds,
)
from trainfit.memory.replay import Stream, replay  # noqa: E402
from trainfit.report.sections.memory import figures_table, quantities  # noqa: E402
from trainfit.results.runs.recording import Recording  # noqa: E402
from trainfit.simgpu.allocator.settings import AllocatorSettings  # noqa: E402


def record(layer: nn.Module, *shape: int, gpu: str = "RTX 4090") -> Recording:
    with trainfit.simulate(gpu) as simulation:
        layer.cuda()(torch.zeros(shape).cuda()).sum().backward()
    return simulation.recording


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_the_figure_lies_within_and_workspaces_widen(reserved: int, added: int) -> None:
    narrow = reserved_bounds(reserved + added, reserved + added)
    wide = reserved_bounds(reserved + added, reserved)
    assert narrow.low <= reserved + added <= narrow.high
    assert wide.low <= narrow.low
    assert wide.high >= narrow.high
    # More with the workspaces than without them is not always so: blocks fall differently.
    assert reserved_bounds(reserved, reserved + added) == reserved_bounds(reserved, reserved)


def test_without_estimates_allocated_memory_is_certain_but_for_what_is_left_of_blocks() -> None:
    recording = record(nn.Linear(512, 512), 64, 512)
    allocated, reserved = bounds_of(replay(Stream.of(recording)))
    peak = replay(Stream.of(recording)).peak_allocated
    assert allocated.low < peak < allocated.high
    assert allocated.high - allocated.low == pytest.approx(0.005 * peak, rel=0.01)
    assert reserved.low < reserved.high


@pytest.mark.parametrize(("gpu", "share"), [("RTX 4090", 1.0), ("H200", 0.15)])
def test_allocated_is_as_uncertain_as_the_workspace_at_its_peak(gpu: str, share: float) -> None:
    """All of it, or a share where such workspaces were measured; and 1.25% of the whole."""
    layer, shape = nn.Conv2d(64, 64, 3, padding=1, bias=False), (8, 64, 64, 64)
    outcome = replay(Stream.of(record(layer, *shape, gpu=gpu)))
    allocated, _ = bounds_of(outcome)
    bare = replay(outcome.stream.without(outcome.stream.estimated)).peak_allocated
    added = outcome.peak_allocated - bare
    tensor = 8 * 64 * 64 * 64 * 4
    # Input, result, the sum's expanded gradient made whole, and the weight gradient's workspace.
    assert added > tensor
    margin = share * added + 0.0125 * outcome.peak_allocated
    assert outcome.peak_allocated - allocated.low == pytest.approx(margin, rel=0.01)
    assert allocated.high - outcome.peak_allocated == outcome.peak_allocated - allocated.low


def test_figures_carry_ranges_that_the_report_shows() -> None:
    recording = record(nn.Conv2d(64, 64, 3), 8, 64, 64, 64)
    found = figures(replay(Stream.of(recording)), context_parts(recording))
    for value, bounds in (
        (found.allocated_bytes, found.allocated_range_bytes),
        (found.reserved_bytes, found.reserved_range_bytes),
        (found.device_bytes, found.device_range_bytes),
    ):
        assert bounds is not None
        assert bounds[0] <= value <= bounds[1]
    assert found.device_range_bytes is not None
    assert found.reserved_range_bytes is not None
    low, high = found.context_range_bytes
    assert found.device_range_bytes[0] == found.reserved_range_bytes[0] + low
    assert found.device_range_bytes[1] == found.reserved_range_bytes[1] + high
    text = str(quantities(found))
    assert "90% prediction intervals" in text
    assert "of measured jobs used more" in text
    tebibytes = dict.fromkeys(("reserved_range_bytes", "device_range_bytes"), (1 << 40, 3 << 40))
    large = dataclasses.replace(found, reserved_bytes=2 << 40, device_bytes=2 << 40, **tebibytes)
    assert "2.00 (1.00 to 3.00) TiB" in str(figures_table({"now": large}))


def test_the_least_capacity_is_the_smallest_that_blocks_which_were_returned_leave() -> None:
    with trainfit.simulate("RTX 4090") as simulation:
        for megabytes in (64, 100, 140):  # none fits into the one before
            torch.empty(megabytes << 20, dtype=torch.uint8, device="cuda")
    stream, context = Stream.of(simulation.recording), 300 << 20
    device = DeviceCapacity(1 << 40, context, AllocatorSettings())
    assert device.unlimited(stream).peak_reserved == 304 << 20
    assert least_capacity(stream, device) == pytest.approx((300 + 140) << 20, rel=1 / 256)
    needed = device.needed(stream)
    assert (needed.fits, needed.peak_reserved) == (True, 140 << 20)


def test_blocks_that_are_used_again_are_needed() -> None:
    with trainfit.simulate("RTX 4090") as simulation:
        for megabytes in (140, 100, 64):
            torch.empty(megabytes << 20, dtype=torch.uint8, device="cuda")
    stream = Stream.of(simulation.recording)
    device = DeviceCapacity(100 << 20, 0, AllocatorSettings())
    assert not device.replay(stream).fits
    assert device.needed(stream).peak_reserved == device.unlimited(stream).peak_reserved
