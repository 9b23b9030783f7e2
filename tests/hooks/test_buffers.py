"""Containers with a bound that keep tensors on the GPU, and what memory grows by until they are
full."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import sys
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainfit
from trainfit.findings.training.learning import of_learning
from trainfit.hooks.limits import Buffer, bounded_buffers
from trainfit.memory.explanation import summarize
from trainfit.memory.growth import step_pattern
from trainfit.plan.growth_findings import of_steps, with_growth
from trainfit.plan.sizing.memory_model import Growth
from trainfit.report.sections.memory import recording_subject
from trainfit.results.files.decoding import as_json
from trainfit.results.runs.learning import LearningFacts


@pytest.fixture(autouse=True)
def _nothing_of_other_tests() -> None:
    """What they leave in cycles (modules of their own) has lists of tensors, too."""
    gc.collect()


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
        found = bounded_buffers()
        recording = simulation.recording
        recording.header["buffers"] = [list(each) for each in found]
        return next(iter(found), None), recording


def test_looking_for_the_limit_of_a_list_keeps_nothing_of_the_functions_that_run() -> None:
    if sys.gettrace() is not None:
        pytest.skip("a function that is traced keeps its variables")
    with trainfit.simulate("T4"):
        kept = [torch.rand(250, device="cuda") for _ in range(3)]
        batch = torch.rand(1000, device="cuda")
        gone = weakref.ref(batch)
        assert not bounded_buffers() and len(kept) == 3
        del batch
        assert gone() is None


def test_a_buffer_ends_the_growth() -> None:
    found, recording = _trained_with_buffer(1000)
    assert found == Buffer(7 * 1024, 6, 994)
    pattern = step_pattern(recording, reserved_bytes=0)
    assert (pattern.course, pattern.growth_bytes_per_step) == ("growing", 1024)
    assert pattern.grows_by_bytes == 994 * 1024 and pattern.steps_until_full is None
    assert "it ends with 994 KiB more" in " ".join(
        note.text for note in recording_subject(summarize(recording, "run")).notes
    )


def test_two_pools_that_grow_together() -> None:
    """CycleGAN keeps images of both generators, 50 of each; here one has room for fewer."""
    with trainfit.simulate("T4") as simulation:
        small: deque[Any] = deque(maxlen=20)
        large: deque[Any] = deque(maxlen=50)
        model = nn.Linear(16, 4).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(6):
            image = torch.rand(250, device="cuda")
            small.append(image)
            large.extend([torch.rand(250, device="cuda"), image])
            optimizer.zero_grad()
            model(torch.rand(8, 16, device="cuda")).mean().backward()
            optimizer.step()
        (found,) = bounded_buffers()
        assert found == Buffer(12 * 1024, 12, 38), "the image that both have counts once"
        large.clear()
        for _ in range(6):
            large.extend(torch.rand(250, device="cuda") for _ in range(2))
        recording = simulation.recording
        recording.header["buffers"] = [list(each) for each in bounded_buffers()]
    assert recording.header["buffers"] == [[12 * 1024, 12, 38], [6 * 1024, 6, 14]]
    pattern = step_pattern(recording, reserved_bytes=0)
    assert (pattern.course, pattern.growth_bytes_per_step) == ("growing", 2048)
    recording.header["buffers"] = [[6 * 1024, 6, 38], [6 * 1024, 6, 14]]
    pattern = step_pattern(recording, reserved_bytes=0)
    assert pattern.grows_by_bytes == (38 + 14) * 1024 and pattern.steps_until_full is None


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
    assert fits.severity == "info" and "deque that keeps it is full" in fits.title
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


_TRAINING = """
import torch
class Memory:
    size = 40
    def __init__(self):
        self.kept, self.place = {made}, 0
    def push(self, one):
        {push}
memory = Memory()
for step in range(10):
    memory.push((torch.zeros(250, device="cuda"), step))
"""


@pytest.mark.parametrize(
    ("made", "push", "left"),
    [
        (
            "[]",
            "self.kept.append(one)\n        if len(self.kept) > self.size: self.kept.pop(0)",
            30,
        ),
        (
            "[]",
            "if self.size <= len(self.kept): del self.kept[0]\n        self.kept.append(one)",
            30,
        ),
        (
            "[]",
            "if len(self.kept) < self.size * 2: self.kept.append(None)\n"
            "        self.kept[self.place] = one; self.place += 1",
            70,
        ),
        (
            "[]",
            "if len(self.kept) >= int(1e3): self.kept[self.place % 1000] = one\n"
            "        else: self.kept.append(one)",
            990,
        ),
        ("[None] * 25", "self.kept[self.place] = one; self.place += 1", 15),
        ("[]", "self.kept.append(one)\n        self.kept = self.kept[-12:]", 2),
        # Nothing holds these at a length.
        ("[]", "self.kept.append(one)", None),
        ("[]", "self.kept.append(one)\n        if len(self.kept) > 99: print(self.kept)", None),
        (
            "[]",
            "for _ in range(2): self.kept.append(one)\n"
            "        if len(self.kept) > self.size: self.kept.pop(0)",
            None,
        ),
    ],
)
def test_a_list_that_the_script_keeps_short(
    made: str, push: str, left: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "short_list.py"
    script.write_text(_TRAINING.format(made=made, push=push))
    monkeypatch.syspath_prepend(tmp_path)
    with trainfit.simulate("T4"):
        memory = importlib.import_module("short_list").memory
        found = [each.left for each in bounded_buffers()]
        assert found == ([] if left is None else [left]) and memory
    del sys.modules["short_list"]


def test_a_list_of_a_function_that_runs(tmp_path: Path) -> None:
    with trainfit.simulate("T4"):
        most, history = 1 << 20, []
        for _ in range(4):
            history.append(torch.zeros(250, device="cuda"))
            if len(history) > most:
                history.pop(0)
        assert bounded_buffers() == (Buffer(4 * 1024, 4, most - 4),)


def test_parameter_lists_leave_room_for_a_buffer() -> None:
    with trainfit.simulate("T4"):
        layers = [torch.nn.Linear(64, 64, device="cuda") for _ in range(8)]
        parameters = [list(layer.parameters()) for layer in layers]
        capacity, kept = 8, []
        for _ in range(4):
            kept.append(torch.zeros(250, device="cuda"))
            if len(kept) > capacity:
                kept.pop(0)
        assert bounded_buffers() == (Buffer(4 * 1024, 4, capacity - 4),)
        assert len(parameters) == 8


def test_elements_that_raise_hold_nothing_that_is_known() -> None:
    class Odd(dict[str, torch.Tensor]):
        def values(self) -> Any:
            raise RuntimeError("closed")

    kept = deque([Odd()], maxlen=4)
    assert not bounded_buffers() and len(kept) == 1
