"""The first answer of a plan: said once, while the first run goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.helpers_page import large_recording
from trainfit.hardware import find_gpu
from trainfit.hardware.context_memory import device_constants
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.first_run import FirstRun, Settings


@pytest.mark.parametrize(("allocations", "answers"), [(0, 0), (8, 1)])
def test_a_run_without_a_tensor_on_the_gpu_is_not_said_to_fit(
    allocations: int, answers: int, tmp_path: Path
) -> None:
    """DCGAN of pytorch/examples without --accel: 296 MiB of context fit."""
    (tmp_path / "train.py").touch()
    told: list[Any] = []
    runs = SimpleNamespace(is_over=False, early=None)
    gpu = find_gpu("RTX 3090")
    FirstRun(
        parse_command(["python", str(tmp_path / "train.py")]),
        gpu,
        Settings(),
        device_constants(gpu),
        cast(Any, runs),
        cast(Any, SimpleNamespace(first_answer=told.append)),
    )
    cast(Any, runs.early)(large_recording(allocations))
    assert len(told) == answers
