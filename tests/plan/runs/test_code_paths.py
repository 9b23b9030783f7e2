"""Steps that do something else at another batch size."""

from __future__ import annotations

import dataclasses
import json

import torch
from torch import nn

from trainfit.plan.sizing.attempts import other_path
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.steps import StepMakeup
from trainfit.simgpu import Simulation


def recorded(layers: int, accumulation: int = 1) -> Recording:
    with Simulation("RTX 3090") as simulation:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            for _ in range(accumulation):
                model(torch.ones(4, 8, device="cuda")).sum().backward()
            optimizer.step()
    makeup = StepMakeup(4, accumulation, 4 * accumulation, per_step=(accumulation, accumulation))
    header = {
        **simulation.recording.header,
        "step": json.loads(json.dumps(dataclasses.asdict(makeup))),
    }
    return dataclasses.replace(simulation.recording, header=header)


def test_runs_of_the_same_path_say_nothing() -> None:
    same = recorded(4)
    assert other_path(8, {8: same, 16: same, 512: recorded(4)}) == ""


def test_a_loop_over_samples_is_no_other_path() -> None:
    assert other_path(8, {8: recorded(4), 16: recorded(8), 4: recorded(2)}) == ""


def test_another_path_is_said_with_its_operators() -> None:
    text = other_path(8, {8: recorded(8), 16: recorded(8), 512: recorded(2)})
    assert "at batch size 512" in text and "at batch size 16" not in text
    assert "try other batch sizes on the GPU" in text


def test_fewer_micro_batches_a_step_are_no_other_path() -> None:
    """Scripts that keep their effective batch size accumulate over fewer larger batches."""
    assert other_path(8, {8: recorded(8, accumulation=8), 64: recorded(8)}) == ""


def test_micro_batches_do_not_hide_another_path() -> None:
    assert "at batch size 64" in other_path(8, {8: recorded(8), 64: recorded(2, accumulation=4)})
