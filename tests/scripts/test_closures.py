"""Steps of LBFGS: few of their evaluations are simulated, and their history is full."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainfit.hardware import find_gpu
from trainfit.memory.replay import Stream, replay
from trainfit.plan.sizing.costing import machine_of
from trainfit.results.runs.recording import Recording
from trainfit.scripts.phases.closures import RepeatedClosures, evaluations
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation
from trainfit.speed.step import step_time
from trainfit.speed.work import Work

STEPS, WIDTH = 3, 512


def _run(**options: Any) -> tuple[Recording, int]:
    """A training, and how often its last step computed the loss."""
    calls = 0
    patches = PatchSet()
    repeated: list[list[int]] = []
    with Simulation("RTX 4090") as simulation:
        RepeatedClosures(simulation, repeated).install(patches)
        model = torch.nn.Linear(WIDTH, WIDTH).cuda()
        optimizer = torch.optim.LBFGS(model.parameters(), **options)
        x = torch.rand(64, WIDTH).cuda()

        def closure() -> torch.Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        try:
            for _ in range(STEPS):
                calls = 0
                optimizer.step(closure)
        finally:
            patches.restore()
        assert optimizer.param_groups[0]["max_iter"] == options.get("max_iter", 20)
        recording = simulation.recording
    recording.header["repeated"] = repeated
    recording.check()
    return recording, calls


def _seconds(recording: Recording) -> float:
    return step_time(Work.of_step(recording, STEPS - 1), machine_of(find_gpu("RTX 4090"))).seconds


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_three_evaluations_stand_for_the_others(search: str | None) -> None:
    few, _ = _run(max_iter=5, line_search_fn=search, history_size=2)
    many, calls = _run(max_iter=20, line_search_fn=search, history_size=2)
    assert 3 <= calls <= 4
    assert 3.0 < _seconds(many) / _seconds(few) < 6.0


def test_the_history_is_full() -> None:
    """torch/optim/lbfgs.py: two vectors of all parameters for each of ``history_size``."""
    short, long = (_run(history_size=size)[0] for size in (10, 110))
    peaks = [replay(Stream.of(each)).peak_allocated for each in (short, long)]
    vector = 4 * (WIDTH * WIDTH + WIDTH)
    assert peaks[1] - peaks[0] == pytest.approx(100 * 2 * vector, rel=0.06)


def test_evaluations_of_a_step() -> None:
    optimizer = torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(1))])
    assert evaluations(optimizer.param_groups[0]) == 20
    optimizer = torch.optim.LBFGS(
        [torch.nn.Parameter(torch.zeros(1))], line_search_fn="strong_wolfe"
    )
    assert evaluations(optimizer.param_groups[0]) == 25


def test_parameters_on_the_cpu_converge_as_they_do() -> None:
    patches = PatchSet()
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = torch.optim.LBFGS([weight], lr=1.0)
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    with Simulation("RTX 4090") as simulation:
        RepeatedClosures(simulation, []).install(patches)
        try:
            optimizer.step(closure)
        finally:
            patches.restore()
    assert weight.item() == pytest.approx(0.0, abs=1e-3) and calls < 20
