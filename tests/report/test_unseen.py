"""What a memory figure of a few steps is not for, which ends a headline."""

from __future__ import annotations

import dataclasses

import pytest

from trainfit.report.steps import (
    coverage_text,
    eager_text,
    only_seen,
    pattern_lines,
    unseen_text,
)
from trainfit.results.runs.steps import Coverage, StepPattern

_SEEN = Coverage(False, False, 0.05, 64)


@pytest.mark.parametrize(
    ("changes", "steps", "text"),
    [
        ({}, 3, "; no evaluation or checkpoint in 3 steps"),
        ({"evaluated": True}, 3, "; evaluation but no checkpoint in 3 steps"),
        # How long an epoch is, is not known.
        ({"steps_per_epoch": None}, 3, "; no evaluation or checkpoint in 3 steps"),
        ({"evaluated": True, "saved": True}, 3, ""),
        # The next epoch had begun: there is none, or the steps show it.
        ({}, 65, ""),
        ({"steps_per_epoch": None, "is_whole": True}, 3, ""),
    ],
)
def test_what_was_not_among_the_steps(changes: dict[str, object], steps: int, text: str) -> None:
    assert unseen_text(dataclasses.replace(_SEEN, **changes), None, steps) == text  # type: ignore[arg-type]


def test_calls_of_a_model_have_no_evaluation() -> None:
    calls = StepPattern("settled", 3, (1, 1, 1), (1, 1, 1), unit="model call")
    assert unseen_text(_SEEN, calls, 3) == "" and unseen_text(None, None, 3) == ""
    assert coverage_text(_SEEN, 3, "call") == ""
    of_steps = coverage_text(_SEEN, 3)
    assert of_steps == "no evaluation or checkpoint in 3 steps; --steps 65 ends an epoch"
    of_60 = coverage_text(dataclasses.replace(_SEEN, most_steps=60), 3)
    assert of_60 == "no evaluation or checkpoint in 3 steps; the training has 60 steps"
    assert coverage_text(dataclasses.replace(_SEEN, most_steps=640), 3) == of_steps


def test_what_is_compiled_on_a_gpu_was_simulated_in_eager_mode() -> None:
    compiled = dataclasses.replace(_SEEN, is_eager=True)
    assert eager_text(compiled) == " in eager mode (torch.compile is left out)"
    assert eager_text(_SEEN) == eager_text(None) == ""


def test_a_buffer_that_fills_is_told_where_it_matters() -> None:
    """The last losses that a meter keeps are next to nothing of a step's memory; images are not."""
    peaks = 1 << 30, (1 << 30) + 2048, (1 << 30) + 4096
    losses = StepPattern(
        "growing", 3, peaks, peaks, growth_bytes_per_step=2048, grows_by_bytes=10 << 10
    )
    assert not only_seen(losses)
    assert pattern_lines(losses) == [
        "memory grows by 2 KiB with each optimizer step (3 simulated), 10 KiB in all"
    ]
    images = dataclasses.replace(losses, grows_by_bytes=66 << 20)
    assert only_seen(images) == "; 66 MiB more when the buffer that it fills is full"
    assert "it ends with 66 MiB more" in pattern_lines(images)[0]
