"""A policy that plays before each update, and trainings that compute something else first."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributions import Categorical

import trainfit
from trainfit.hardware import find_gpu
from trainfit.results.findings import Finding
from trainfit.speed.efficiency import FITTED
from trainfit.speed.slow_lines import sampling_before_step
from trainfit.speed.step import HostedGpu


def _found(before: Callable[[nn.Module], object]) -> list[Finding]:
    with trainfit.simulate("RTX 4090") as simulation:
        policy = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).to("cuda")
        optimizer = torch.optim.SGD(policy.parameters(), 0.1)
        before(policy)
        for _ in range(3):
            optimizer.zero_grad()
            policy(torch.rand(64, 16).to("cuda")).square().mean().backward()
            optimizer.step()
        return list(
            sampling_before_step(simulation.recording, HostedGpu(find_gpu("RTX 4090"), FITTED))
        )


def _play(policy: nn.Module, calls: int = 100) -> None:
    for _ in range(calls):
        with torch.no_grad():
            Categorical(logits=policy(torch.rand(16).to("cuda"))).sample().item()


def _evaluate(policy: nn.Module) -> None:
    for _ in range(100):
        with torch.no_grad():
            policy(torch.rand(64, 16).to("cuda")).argmax(1).sum().item()


def test_a_policy_that_plays_before_its_update() -> None:
    (found,) = _found(_play)
    assert found.title.startswith("100 calls of models") and found.severity == "info"
    assert found.place is not None and found.place.file.endswith("test_sampling.py")


def test_what_is_no_sampling() -> None:
    assert not _found(lambda policy: None)
    assert not _found(_evaluate)
    assert not _found(lambda policy: _play(policy, calls=8))
