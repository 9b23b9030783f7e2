"""Containers with a bound that keep tensors on the GPU, and what memory grows by until they are
full."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from typing import Any

import torch
from torch import nn

import trainfit
from trainfit.findings.learning import of_learning
from trainfit.hooks.buffers import Buffer, largest_buffer
from trainfit.memory.explanation import summarize
from trainfit.memory.growth import step_pattern
from trainfit.plan.growth_findings import of_steps, with_growth
from trainfit.plan.sizing.memory_model import Growth
from trainfit.report.sections.memory import recording_subject
from trainfit.results.files.decoding import as_json
from trainfit.results.runs.learning import LearningFacts


def _trained_with_buffer(maxlen: int | None) -> Any:
    """A recording of 6 steps, each of which puts a tensor of 1000 bytes into a deque, and the next
    one again."""
    with trainfit.simulate("T4") as simulation:
        buffer: deque[Any] = deque(maxlen=maxlen)
        model = nn.Linear(16, 4).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        state = torch.rand(250, device="cuda")
        for _ in range(6):
            following = torch.rand(250, device="cuda")
            buffer.append({"pair": (state, following), "done": False})
            state = following
            optimizer.zero_grad()
            model(torch.rand(8, 16, device="cuda")).mean().backward()
            optimizer.step()
        found = largest_buffer()
        recording = simulation.recording
        if found is not None:
            recording.header["buffer"] = list(found)
        return found, recording


def test_a_buffer_ends_the_growth() -> None:
    found, recording = _trained_with_buffer(1000)
    assert found == Buffer(7 * 1024, 6, 994)
    pattern = step_pattern(recording, reserved_bytes=0)
    assert (pattern.course, pattern.growth_bytes_per_step) == ("growing", 1024)
    assert pattern.grows_by_bytes == 994 * 1024 and pattern.steps_until_full is None
    assert "it ends with 994 KiB more" in " ".join(
        note.text for note in recording_subject(summarize(recording, "run")).notes
    )


def test_a_buffer_that_is_too_large() -> None:
    _, recording = _trained_with_buffer(100_000_000)
    pattern = step_pattern(recording, reserved_bytes=0)
    assert pattern.steps_until_full is not None and pattern.grows_by_bytes is not None
    assert pattern.grows_by_bytes > 16 << 30


def test_a_deque_without_a_bound_is_none() -> None:
    found, recording = _trained_with_buffer(None)
    assert found is None
    assert step_pattern(recording, reserved_bytes=0).grows_by_bytes is None


def test_what_is_said_of_a_buffer() -> None:
    pattern = step_pattern(_trained_with_buffer(1000)[1], reserved_bytes=0)
    (fits,) = of_steps(pattern, Growth(1024, 0))
    assert fits.severity == "info" and "until the deque that keeps it is full" in fits.title
    assert "CPU" in fits.fixes[0].action
    summary = summarize(_trained_with_buffer(1000)[1], "run")
    assert with_growth(summary).findings == ()  # 1 KiB a step is little for this GPU
    small = summary.memory.device_bytes + (1 << 29)
    assert with_growth(dataclasses.replace(summary, gpu_memory_bytes=small)).findings == (fits,)
    (full,) = of_steps(dataclasses.replace(pattern, steps_until_full=9), Growth(1024, 0))
    assert full.severity == "critical" and full.title.endswith("which the GPU does not have")


def test_a_recording_says_what_its_run_does_wrong() -> None:
    _, recording = _trained_with_buffer(None)
    (finding,) = of_learning(LearningFacts(steps=4, steps_scaled=4))
    recording.header["findings"] = [json.loads(as_json(finding))]
    recording.check()
    summary = summarize(recording, "run")
    assert summary.findings == (finding,)
    assert recording_subject(summary).sections[0].title == "What is wrong"


def test_elements_that_raise_hold_nothing_that_is_known() -> None:
    class Odd(dict[str, torch.Tensor]):
        def values(self) -> Any:
            raise RuntimeError("closed")

    kept = deque([Odd()], maxlen=4)
    assert largest_buffer() is None and len(kept) == 1
