"""What passes between the GPUs of a process, and what each does, in a step."""

from __future__ import annotations

import dataclasses
import typing

import pytest
import torch
from torch import nn

from trainfit.hardware.gpu_topology import find_gpus
from trainfit.plan.sizing import stages
from trainfit.plan.sizing.costing import machine_of
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.plan.sizing.speed import transfers
from trainfit.results.findings import FAILS_LATER
from trainfit.results.runs.recording import Recording, RecordingHeader
from trainfit.results.speed import GpuShare, GpusOfProcess
from trainfit.simgpu import Simulation
from trainfit.simgpu.allocator.settings import AllocatorSettings
from trainfit.speed.work import Work


def test_a_period_of_equal_steps_is_one_of_them() -> None:
    gpu = find_gpus("2x RTX 4090")
    with Simulation(gpu) as simulation:
        model = nn.DataParallel(nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 64)).cuda())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.zeros(32, 64, device="cuda")).sum().backward()
            optimizer.step()
    machine = machine_of(gpu)
    one, two = (Work.of_step(simulation.recording, 2, count) for count in (1, 2))
    assert transfers(one, machine)
    for alone, mean in zip(transfers(one, machine), transfers(two, machine), strict=True):
        assert (mean.kind, mean.calls, mean.nbytes) == (alone.kind, alone.calls, alone.nbytes)
        assert mean.seconds == pytest.approx(alone.seconds)
    by_ddp = [stages._by_ddp(work, machine, 2) for work in (one, two)]
    assert by_ddp[0] is not None and by_ddp[1] == pytest.approx(by_ddp[0], rel=0.1)
    shares = [stages._busy(work, machine) for work in (one, two)]
    assert shares[1] == pytest.approx(shares[0], rel=0.1)


def test_what_another_rank_puts_on_the_first_gpu() -> None:
    """`map_location="cuda:0"` in each rank: the first GPU holds it once for each of them."""
    gpu = find_gpus("4x RTX 4090")
    model = MemoryModel(gpu, AllocatorSettings(), 0.0, ())

    def recorded(device: str, loads_mib: int) -> Recording:
        with Simulation(gpu) as simulation:
            torch.zeros(256 << 20, dtype=torch.uint8, device=device)
            loaded = torch.zeros(loads_mib << 20, dtype=torch.uint8, device="cuda:0")
            del loaded
        recording = simulation.recording
        header = typing.cast(RecordingHeader, {**recording.header, "ranks": 4})
        own = int(device.removeprefix("cuda:"))
        return dataclasses.replace(recording, header=header).seen_from(own)

    first, other = recorded("cuda:0", 512), recorded("cuda:3", 512)
    (found,) = stages.strays(other, 3, first, model, 1 << 30)
    assert found.severity == "warning" and found.place is not None
    assert "Rank 3 puts 512 MiB on GPU 0" in found.title and "the other 3 ranks" in found.title
    # It is rank 0's own, and of the first rank of another machine.
    assert not stages.strays(first, 0, first, model, 1 << 30)
    assert not stages.strays(recorded("cuda:3", 0), 3, first, model, 1 << 30)
    cause, fails = stages.strays(recorded("cuda:3", 8 << 10), 3, first, model, 1 << 30)
    assert cause.kind != fails.kind == FAILS_LATER and "on GPU 0" in fails.subject


@pytest.mark.parametrize(
    ("batch", "machine", "used", "idle"),
    [
        (6, 4, 3, True),  # 2, 2 and 2
        (8, 4, 4, False),
        (9, 8, 5, True),  # 2, 2, 2, 2 and 1
        (64, 4, 2, False),  # device_ids=[0, 1]
    ],
)
def test_gpus_for_which_a_batch_has_no_part(
    batch: int, machine: int, used: int, idle: bool
) -> None:
    shares = tuple(GpuShare(gpu, 1 << 20, 1 << 30, 0.5) for gpu in range(used))
    gpus = GpusOfProcess("PCIe", shares, (), replicated=True)
    (finding,) = stages.of_gpus(gpus, 0.1, machine, batch)
    assert ("without work" in finding.title) is idle
    if idle:
        assert f"{machine - used} GPU" in finding.title and f"{used} parts of 2" in finding.cause
