"""Kernels in float64 that a float32 training has by mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trainfit
from trainfit.hardware import find_gpu
from trainfit.results.findings import Finding
from trainfit.results.runs.steps import DTYPES
from trainfit.speed.efficiency import FITTED
from trainfit.speed.kernel_times import peak_flops
from trainfit.speed.slow_lines import float64_on_gpu
from trainfit.speed.step import HostedGpu

Tensor = torch.Tensor


def _found(loss: Callable[[Tensor, Tensor], Tensor], gpu: str = "RTX 4090") -> list[Finding]:
    with trainfit.simulate(gpu) as simulation:
        model = nn.Linear(256, 8192).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            x, y = torch.rand(4096, 256).to("cuda"), torch.randint(0, 8192, (4096,)).to("cuda")
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
        return list(float64_on_gpu(simulation.recording, HostedGpu(find_gpu(gpu), FITTED)))


def test_a_loss_in_float64() -> None:
    (found,) = _found(lambda output, y: F.cross_entropy(output.double(), y))
    assert found.place is not None and found.place.file.endswith("test_wide.py")
    assert found.severity == "warning" and "in float32" in found.title


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        lambda output, y: F.cross_entropy(output, y, reduction="none").double().sum(),
    ],
)
def test_losses_in_float32_and_single_sums_in_float64(loss: Callable[..., Tensor]) -> None:
    assert not _found(loss)


def test_a_gpu_made_to_measure_has_no_rates() -> None:
    assert not _found(lambda output, y: F.cross_entropy(output.double(), y), "custom:8GiB")


@pytest.mark.parametrize(
    ("gpu", "share"), [("RTX 4090", 1 / 64), ("T4", 1 / 32), ("V100 16GB PCIe", 1 / 2)]
)
def test_the_rate_of_float64(gpu: str, share: float) -> None:
    spec = find_gpu(gpu)
    assert peak_flops(spec)[DTYPES.index("float64")] == share * spec.fp32_flops
