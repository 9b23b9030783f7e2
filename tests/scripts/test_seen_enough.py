"""How many steps a run is worth whose memory differs from step to step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainfit.results.runs.spec import RunSpec
from trainfit.results.runs.trace import Target
from trainfit.scripts.trace_run import Runner
from trainfit.simgpu.device.settling import LEAST_STEPS, MOST_STEPS, StepUse


@pytest.mark.parametrize(
    ("steps", "lasted_s", "is_enough"),
    [
        (LEAST_STEPS - 1, 290.0, False),
        (LEAST_STEPS + 1, 140.0, False),
        (LEAST_STEPS + 1, 160.0, True),
        (MOST_STEPS, 10.0, True),
    ],
)
def test_steps_of_any_memory_go_on_for_a_quarter_of_the_time_limit(
    steps: int, lasted_s: float, is_enough: bool
) -> None:
    uses = [StepUse(100 * n * n % 7, 0, n * n % 5, n) for n in range(steps)]
    target = Target("script", "train.py", ())
    runner: Any = SimpleNamespace(
        _spec=RunSpec(target=target, steps=MOST_STEPS, until_settled=True, time_limit_s=600.0),
        _simulation=SimpleNamespace(warm_up_steps=0, step_uses=lambda: uses),
        _step=SimpleNamespace(feeds=(), warms_up=lambda: False),
        _own_s=lambda: lasted_s,
        _is_late=lambda: lasted_s > 300.0,
    )
    assert Runner._seen_enough(runner, steps) is is_enough
