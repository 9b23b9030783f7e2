"""Lines that run once for each sample of a batch on the GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import trainfit
from trainfit.results.findings import Finding
from trainfit.results.runs.steps import StepMakeup
from trainfit.scripts.step_makeup import with_makeup
from trainfit.speed.slow_lines import loops_on_gpu

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


class _Net(nn.Module):
    """A layer of its own for each of ``rounds`` rounds, or one for all."""

    def __init__(self, rounds: int, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(rounds))
        self.how, self.rounds = how, rounds

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "samples":
            return torch.stack([self.layers[0](each).relu() for each in x])
        for number in range(self.rounds):
            x = self.layers[number if self.how == "deep" else 0](x).relu()
        return x


def _in_model(rounds: int, how: str, batch: int = 32) -> list[Finding]:
    with trainfit.simulate("T4") as simulation:
        model = _Net(rounds, how).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.rand(batch, 16).to("cuda")).mean().backward()
            optimizer.step()
        recording = simulation.recording
        makeup = StepMakeup(batch, 1, batch)
        return list(loops_on_gpu(with_makeup(recording, makeup)))


def test_a_loop_within_the_model() -> None:
    (found,) = _in_model(1, "samples")
    assert found.kind == "loop_in_model" and "as many as a batch has samples" in found.title
    assert "whole batch at once" in found.fix.action
    (found,) = _in_model(80, "time")
    assert "run 80 times" in found.title and "nn.LSTM" in found.fix.action
    assert not _in_model(80, "deep")
    assert not _in_model(24, "time")  # layers that share their weights
    assert not _in_model(1, "samples", batch=8)


def _optimized(**options: object) -> list[Finding]:
    with trainfit.simulate("T4") as simulation:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(24))).to("cuda")
        groups = options.pop("groups", False)
        parameters = [{"params": [each]} for each in model.parameters()]
        optimizer = torch.optim.Adam(parameters if groups else model.parameters(), **options)  # type: ignore[arg-type]
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.rand(4, 8).to("cuda")).mean().backward()
            optimizer.step()
        return list(loops_on_gpu(simulation.recording))


def test_an_optimizer_of_one_tensor_after_another() -> None:
    for each in ({"groups": True}, {"foreach": False}):
        (found,) = _optimized(**each)
        assert found.kind == "optimizer_in_pieces" and "Adam" in found.title
    assert not _optimized() and not _optimized(fused=True)


def test_gradients_that_are_clipped_at_the_line_of_a_library_are_no_loop() -> None:
    """The norms of all tensors are results of one operator; a framework's loop calls the model and
    clips at one line of the user's."""
    with trainfit.simulate("T4") as simulation:
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(80))).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.rand(32, 16, device="cuda")
            _ = model(x).mean().backward(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert not list(loops_on_gpu(simulation.recording))
