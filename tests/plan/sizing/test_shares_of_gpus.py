"""What passes between the GPUs of a process, and what each does, in a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainfit.hardware.gpu.topology import find_gpus
from trainfit.plan.sizing import gpus_of_process
from trainfit.plan.sizing.costing import machine_of
from trainfit.plan.sizing.speed import transfers
from trainfit.simgpu import Simulation
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
    by_ddp = [gpus_of_process._by_ddp(work, machine, 2) for work in (one, two)]
    assert by_ddp[0] is not None and by_ddp[1] == pytest.approx(by_ddp[0], rel=0.1)
    shares = [gpus_of_process._busy(work, machine) for work in (one, two)]
    assert shares[1] == pytest.approx(shares[0], rel=0.1)
