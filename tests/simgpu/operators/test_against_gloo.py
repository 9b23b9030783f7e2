"""The collectives of a simulated rank against those of two real ones, by gloo on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

import trainfit
from helpers_ranks import as_rank_0
from tests.simgpu.operators.gloo import Sent, real_ranks, recorded_ranks
from tests.simgpu.operators.test_several_ranks import launched

RANKS: Final = 2

#: A training that is the same on any device; DEVICE is the real one's or the simulated one's.
TRAIN: Final = """
import torch
from torch import distributed, nn

def train(device, options):
    torch.manual_seed(0)
    layers = [nn.Linear(700, 700), nn.ReLU(), nn.BatchNorm1d(700), nn.Linear(700, 700)]
    model = nn.Sequential(*layers, nn.Linear(700, 10)).to(device)
    ddp = nn.parallel.DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    for step in range(3):
        if step == 1:
            with ddp.no_sync():
                ddp(torch.randn(4, 700, device=device)).square().mean().backward()
        loss = ddp(torch.randn(4, 700, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        distributed.all_reduce(total)
    found = [torch.zeros(3, device=device) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, torch.ones(3, device=device))
"""

JOBS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"bucket_cap_mb": 1},
    {"gradient_as_bucket_view": True, "find_unused_parameters": True},
)


@pytest.fixture
def real() -> Sent:
    return recorded_ranks(TRAIN, JOBS, RANKS)


@pytest.mark.slow
def test_real_ranks_send_what_is_recorded(tmp_path: Path, real: Sent) -> None:
    assert real_ranks(tmp_path, TRAIN, JOBS, RANKS) == real


def test_ddp_sends_what_real_ranks_send(real: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = real
    assert first == second and min(map(len, first)) > 8
    as_rank_0(monkeypatch, RANKS)
    script: dict[str, Any] = {}
    exec(TRAIN, script)
    for options, expected in zip(JOBS, first, strict=True):
        with trainfit.simulate(f"{RANKS}x RTX 4090") as simulation:
            script["distributed"].init_process_group("nccl")
            script["train"]("cuda", options)
        assert [row[:2] for row in launched(simulation.recording)] == expected
