"""Lines that run once for each sample of a batch on the GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import trainfit
from trainfit.results.findings import Finding
from trainfit.speed.loops import loops_on_gpu

Tensor = torch.Tensor


def _found(prepare: Callable[[Tensor], Tensor]) -> list[Finding]:
    with trainfit.simulate("T4") as simulation:
        model = nn.Linear(16, 4).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            x = prepare(torch.rand(200, 16).to("cuda"))
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        return list(loops_on_gpu(simulation.recording))


def test_a_loop_over_samples() -> None:
    (found,) = _found(lambda batch: torch.stack([each * 2 + 1 for each in batch]))
    assert found.severity == "info" and found.place is not None
    assert found.place.file.endswith("test_loops.py") and "torch.where" in found.fixes[0].action
    assert not _found(lambda batch: batch * 2 + 1)
    assert not _found(lambda batch: torch.stack([*batch]))
