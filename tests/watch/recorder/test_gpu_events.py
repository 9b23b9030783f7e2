"""The recorder's CUDA side, on the simulated device: what a step takes there is set by the test."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import trainfit
from helpers_recorder import recorded
from trainfit.results.runs import tables
from trainfit.simgpu import cuda_clocks
from trainfit.simgpu.patching import PatchSet
from trainfit.speed.step import StepClock
from trainfit.watch.recorder import cuda_hooks
from trainfit.watch.recorder import phases as ph
from trainfit.watch.recorder.gpu_step import AllocatorMemory, GpuStep, Kept
from trainfit.watch.recorder.rows import Counts, StepRows, new_row


class SetClock:
    """The device's time is what :func:`work` says."""

    now_s: ClassVar[float] = 0.0

    def __init__(self, *_: Any) -> None: ...

    def now(self, stream: int | None = None) -> float:
        return SetClock.now_s

    def host(self) -> float:
        return SetClock.now_s

    def pause(self, seconds: float) -> None: ...


def work(seconds: float) -> None:
    SetClock.now_s += seconds


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(samples)
        work(0.02)
        if out.requires_grad:
            out.register_hook(lambda _: work(0.04))
        return out


class Sgd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        work(0.01)
        return super().step(closure)


@pytest.fixture
def device() -> Iterator[None]:
    simulation = trainfit.simulate("T4")
    cuda_clocks.use(SetClock)
    try:
        with simulation:
            yield
    finally:
        cuda_clocks.use(StepClock)


@pytest.mark.usefixtures("device")
def test_the_times_of_events_are_those_that_were_set(tmp_path: Path) -> None:
    model = Net().cuda()
    optimizer = Sgd(model.parameters(), 0.1)
    with recorded(tmp_path) as run:
        for number in range(6):
            work(0.005)  # the stream is empty meanwhile
            samples = torch.randn(4, 8).to("cuda")
            work(0.003)
            loss = model(samples).sum()
            loss.backward()
            optimizer.step()
            if number % 2:
                loss.item()
    steps, header = run.record.steps, run.record.header
    later = steps[1:]  # in the first CUDA was found
    for name, seconds in {
        "gpu_s": 0.073,
        "gpu_gap_s": 0.005,
        "gpu_copy_s": 0.0,
        "gpu_forward_s": 0.02,
        "gpu_backward_s": 0.04,
        "gpu_optimizer_s": 0.01,
    }.items():
        np.testing.assert_allclose(later[name], seconds, atol=1e-6, err_msg=name)
    assert list(later["syncs"]) == [0, 1, 0, 1, 0]
    assert list(later["copied_bytes"]) == [128] * 5 == list(later["unpinned_bytes"])
    assert (later["copy_s"] > 0).all() and (later["sync_s"][[1, 3]] > 0).all()
    assert steps["allocated_bytes"][0] > 0 and steps["reserved_bytes"][0] >= 2**21
    assert header.gpu == 0 and header.gpus[0].name == "Tesla T4"
    assert header.gpus[0].capability == (7, 5)


@pytest.mark.usefixtures("device")
def test_copies_and_waits_are_counted_once_and_only_where_there_are_any(tmp_path: Path) -> None:
    model = Net().cuda()
    optimizer = Sgd(model.parameters(), 0.1)
    pinned = torch.randn(4, 8).pin_memory()

    def step(extra: Any) -> None:
        out = model(torch.zeros(4, 8, device="cuda"))
        extra(out)
        out.sum().backward()
        optimizer.step()

    extras = [
        lambda out: None,
        lambda out: out.cpu(),
        lambda out: out.to("cpu"),
        lambda out: out.to(torch.float64),
        lambda out: torch.empty_like(out).copy_(pinned),
        lambda out: pinned.to("cuda", non_blocking=True),
        lambda out: pinned.cuda(),
        lambda out: torch.cuda.synchronize(),
        lambda out: bool(out.sum() > 0),
        lambda out: out.to("cpu", non_blocking=True),
        lambda out: torch.cuda.empty_cache(),
        lambda out: out.masked_select(out.detach() > 0),
    ]
    with recorded(tmp_path) as run:
        for extra in extras:
            step(extra)
    steps = run.record.steps[1:]
    assert list(steps["syncs"]) == [1, 1, 0, 0, 0, 0, 1, 1, 0, 1, 1]
    assert list(steps["copied_bytes"]) == [0, 0, 0, 128, 128, 128, 0, 0, 0, 0, 0]
    assert list(steps["unpinned_bytes"]) == [0] * 11


@pytest.mark.usefixtures("device")
def test_an_evaluation_is_no_part_of_the_steps_gpu_time(tmp_path: Path) -> None:
    model = Net().cuda()
    optimizer = Sgd(model.parameters(), 0.1)
    with recorded(tmp_path) as run:
        for number in range(4):
            if number == 2:
                with torch.no_grad():
                    model.eval()
                    for _ in range(5):
                        model(torch.randn(4, 8).to("cuda"))
                    model.train()
            model(torch.zeros(4, 8, device="cuda")).sum().backward()
            optimizer.step()
    steps = run.record.steps
    assert steps["flags"][2] & tables.EVALUATION
    np.testing.assert_allclose(steps["gpu_s"][1:], 0.07, atol=1e-6)
    assert math.isnan(steps["gpu_gap_s"][2]) and steps["copied_bytes"][2] == 0


@pytest.mark.parametrize("late", [False, True])
def test_overrides_of_tensor_methods_see_the_function_that_their_tables_hold(late: bool) -> None:
    seen = []

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    class Off:
        live = False

    before = torch.Tensor.to, torch.Tensor.item
    patches = PatchSet()
    cuda_hooks.install(Off(), patches, late)  # type: ignore[arg-type]
    try:
        after = torch.Tensor.to, torch.Tensor.item
        mine = torch.zeros(()).as_subclass(Mine)
        mine.to(torch.float64)
        assert mine.item() == 0.0
    finally:
        patches.restore()
    assert after != before
    assert [each in seen for each in (before if late else after)] == [True, True]
    assert (torch.Tensor.to, torch.Tensor.item) == before


# -- a GPU that is behind ------------------------------------------------------------------------


class LateDevice:
    """Its GPU has reached the marks up to ``done``; they are a second apart."""

    def __init__(self) -> None:
        self.made = 0
        self.done = -1
        self.released: list[int] = []

    def mark(self) -> int:
        self.made += 1
        return self.made

    def mark_again(self, mark: int) -> None: ...

    def reached(self, mark: int) -> bool:
        return mark <= self.done

    def seconds(self, first: int, last: int) -> float:
        return float(last - first)

    def release(self, mark: int) -> None:
        assert mark not in self.released
        self.released.append(mark)

    def keep(self, number: torch.Tensor) -> Kept:
        return Kept(number, 0)

    def value(self, kept: Kept) -> float:
        return float(kept.values)

    def memory(self) -> AllocatorMemory:
        return AllocatorMemory(1, 2, 3, 0)


def a_row(step: int, end_s: float) -> list[Any]:
    return new_row(
        step=step, end_s=end_s, step_s=0.1, phases=[0.0] * ph.COUNT, counts=Counts(), on_gpu=True,
        cpu_s=0.0, samples=1, batches=1, memory=AllocatorMemory(1, 2, 3, 0),
        numbers=(None, math.nan, math.nan), flags=0,
    )  # fmt: skip


def test_rows_keep_their_order_and_are_not_held_up_for_ever() -> None:
    device, rows, gpu = LateDevice(), [], None
    table = StepRows(rows.append, lambda row: None)
    gpu = GpuStep(device, None)
    for number in range(3):
        gpu.begin(ph.FORWARD)
        gpu.finish(ph.FORWARD)
        gpu.numbers["loss"] = device.keep(torch.tensor(2.0))
        following = gpu.close()
        table.add(a_row(number, float(number)), gpu, False)
        gpu = following
    table.poll(0.5)
    assert not rows
    device.done = 3  # the marks of the first step
    table.poll(0.6)
    assert [row[0] for row in rows] == [0]
    names = dict(zip(tables.STEPS.names or (), rows[0], strict=True))
    assert names["gpu_forward_s"] == 1.0 and names["gpu_s"] == 2.0 and names["loss"] == 2.0
    table.poll(2.5)  # a second after the second step's end, not after the third's
    assert [row[0] for row in rows] == [0, 1] and table.without_gpu_times == 1
    table.drain()
    assert [row[0] for row in rows] == [0, 1, 2] and table.without_gpu_times == 2


def test_a_row_has_a_value_for_each_column() -> None:
    assert len(a_row(0, 0.0)) == len(tables.STEPS.names or ())
