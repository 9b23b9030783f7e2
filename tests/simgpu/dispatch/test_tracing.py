"""``torch.jit.trace`` and graphs for TensorBoard on the simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from trainfit.simgpu.session import Simulation


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))


def test_a_traced_model_trains_as_it_is(sim: Simulation, tmp_path: Path) -> None:
    """A convolution's sizes are tensors while PyTorch traces: "cond must be a bool"."""
    model, images = network().cuda(), torch.randn(2, 3, 8, 8, device="cuda")
    traced = torch.jit.trace(model, images)
    traced(images).sum().backward()
    weight = next(model.parameters())
    assert weight.grad is not None and next(traced.parameters()) is weight
    traced.save(tmp_path / "model.pt")
    assert (tmp_path / "model.pt").exists() and not hasattr(model, "save")
    assert any("torch.jit.trace was skipped" in text for text in sim.engine.assumptions)


def test_a_graph_for_tensorboard_is_left_out(sim: Simulation, tmp_path: Path) -> None:
    """weiaicunzai/pytorch-cifar100 draws its network before the first epoch."""
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(tmp_path)
    model = network().cuda()
    writer.add_graph(model, torch.randn(2, 3, 8, 8).cuda())
    writer.add_graph(network(), [torch.randn(2, 3, 8, 8)])
    writer.close()
    assert model(torch.ones(2, 3, 8, 8, device="cuda")).shape == (2, 5)
