"""What is tried depends on the PyTorch that the job runs with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from trainfit.plan.changes.trials import (
    accumulating,
    allocator_variable,
    allocators_tried,
    computing_in,
    told_trainer,
)
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.runs.tracing import allocator_settings
from trainfit.results.runs.steps import Framework, StepMakeup
from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.allocator.settings import AllocatorSettings


@pytest.mark.parametrize("version", ["2.8.0+cu128", "2.9.1", "2.10.0", "2.13.0"])
def test_settings_are_tried_that_the_jobs_pytorch_has(version: str) -> None:
    tried = allocators_tried("", version)
    assert ("large_segment_size_mb:64" in tried) == (version == "2.13.0")
    for text in tried:
        AllocatorSettings.from_conf(text, version)
    left = allocators_tried("max_split_size_mb:64", version)
    assert left == tuple(text for text in tried if "max_split" not in text)


@pytest.mark.parametrize(
    ("version", "variable", "expandable"),
    [("2.8.0", "PYTORCH_CUDA_ALLOC_CONF", False), ("2.13.0", "PYTORCH_ALLOC_CONF", True)],
)
def test_the_variable_is_one_that_the_jobs_pytorch_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, variable: str, expandable: bool
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    command = parse_command(["PYTORCH_ALLOC_CONF=expandable_segments:True", "python", str(script)])
    interpreter = dataclasses.replace(command.interpreter, torch=version)
    command = dataclasses.replace(command, interpreter=interpreter)
    assert allocator_variable(command)[0] == variable
    assert allocator_settings(command).expandable_segments == expandable


@pytest.mark.parametrize(
    ("name", "target", "said"),
    [
        ("checkpoint", "0:activation_checkpointing_enable", "activation_checkpointing=True"),
        ("checkpoint", "0:gradient_checkpointing_enable", "gradient_checkpointing=True"),
        ("checkpoint", "0:layers.0", "gradient_checkpointing=True"),
        ("sgd", 'in its arguments: optim="sgd"', 'optim="sgd"'),
        ("channels-last", "", ""),
    ],
)
def test_a_trainer_is_told_by_arguments_of_its_version(name: str, target: str, said: str) -> None:
    lines = told_trainer(name, Applicability(name, True, targets=(target,)))
    assert [line.endswith((f": {said}", f"={said}")) for line in lines] == [True] * bool(said)


@pytest.mark.parametrize(
    ("loop", "bfloat16", "accumulation"),
    [
        ("", "", ""),
        ("Transformers", "TrainingArguments(bf16=True, …)", "gradient_accumulation_steps=6"),
        ("Lightning", 'Trainer(precision="bf16-mixed", …)', "Trainer(accumulate_grad_batches=6)"),
        ("Accelerate", 'mixed_precision="bf16"', "Accelerator(gradient_accumulation_steps=6)"),
    ],
)
def test_a_framework_is_told_by_its_own_arguments(
    loop: Framework, bfloat16: str, accumulation: str
) -> None:
    makeup = StepMakeup(4, 3, 12, loop=loop)
    for lines, said in (
        (computing_in("bfloat16", makeup), bfloat16),
        (accumulating(makeup, 4, 2), accumulation),
    ):
        assert len(lines) == bool(loop) and all(said in line for line in lines)
