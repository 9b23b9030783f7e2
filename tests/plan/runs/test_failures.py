"""What is said of scripts that came to nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from trainfit.plan.command.parsing import parse_command
from trainfit.plan.runs.failures import (
    ScriptError,
    absent_kernels,
    cause_of,
    fails_beyond,
    require_step,
    what_happened,
    without_a_step,
)
from trainfit.plan.runs.tracing import Trace
from trainfit.results.runs.script import ScriptOption
from trainfit.results.runs.trace import Status, TraceOutcome


def said(tmp_path: Path, status: Status, message: str, gpus: int = 1, output: str = "") -> str:
    script = tmp_path / "train.py"
    script.write_text("")
    outcome = TraceOutcome(status=status, steps=0, seconds=1.0, message=message)
    with pytest.raises(ScriptError) as caught:
        require_step(Trace(outcome, None, output), parse_command(["python", str(script)]).on(gpus))
    return str(caught.value)


@pytest.mark.parametrize(
    "message",
    [
        "KeyError: 'LOCAL_RANK'",
        "ValueError: Error initializing torch.distributed using env:// rendezvous: environment "
        "variable RANK expected, but not set",
    ],
)
@pytest.mark.parametrize("gpus", [1, 8])
def test_a_script_without_its_launcher(tmp_path: Path, message: str, gpus: int) -> None:
    wanted = f"begin the command with `torchrun --nproc-per-node={gpus}`"
    assert wanted in said(tmp_path, "failed", message, gpus)


@pytest.mark.parametrize(
    ("optimizers", "when"),
    [
        (0, "before its first optimizer step"),
        (1, "before its first optimizer step"),
        (2, "before a whole training step of its 2 optimizers"),
    ],
)
def test_several_optimizers_may_have_made_steps(optimizers: int, when: str) -> None:
    """StyleGAN2 failed in its first evaluation, after a step of each optimizer but the last."""
    assert without_a_step(TraceOutcome(status="failed", optimizers=optimizers)) == when


@pytest.mark.parametrize(("option", "known"), [("--local-rank=0", True), ("--rank=0", False)])
def test_a_script_of_the_old_launcher(tmp_path: Path, option: str, known: bool) -> None:
    """DINO and ConvNeXt know --local_rank alone, which PyTorch 1 gave them."""
    output = f"usage: train.py [-h] [--local_rank N]\nerror: unrecognized arguments: {option}\n"
    text = said(tmp_path, "exited", "exit code 2", gpus=8, output=output)
    assert ("begin the command with `torchrun --nproc-per-node=8`" in text) is known
    assert ("its own message is below" in text) is not known


@pytest.mark.parametrize(
    "message",
    [
        "exit code 1: This example requires at least 2 GPUs",
        "exit code 1: needs two CUDA devices",
        "exit code 1: run me on more than one GPU",
        "exit code 1: multiple gpus are needed",
    ],
)
def test_a_script_that_needs_several_gpus(tmp_path: Path, message: str) -> None:
    assert 'name them, as in --gpu "2x RTX 4090"' in said(tmp_path, "exited", message)


def test_a_program_that_is_missing_is_no_file_of_the_users(tmp_path: Path) -> None:
    missing = "FileNotFoundError: [Errno 2] No such file or directory: '{}'"
    assert "put 'd.csv' there" in said(tmp_path, "failed", missing.format("d.csv"))
    assert "nvidia-smi' there" not in said(tmp_path, "failed", missing.format("nvidia-smi"))


@pytest.mark.parametrize(
    "message",
    ["exit code 1: 2 files are missing", "exit code 1: no CUDA device", "KeyError: 'image'"],
)
def test_other_messages_are_left_alone(tmp_path: Path, message: str) -> None:
    text = said(tmp_path, "exited", message)
    assert "one GPU is simulated" not in text
    assert "torchrun" not in text


@pytest.mark.parametrize(
    ("option", "fix"),
    [
        (ScriptOption(("--accel",), "accel", "False", False, switch=True), "its option --accel"),
        (ScriptOption(("--no-cuda",), "no_cuda", "True", True, switch=True), "out its option --no"),
        (ScriptOption(("-d", "--device"), "device", "cpu", False), "-d cuda in place of cpu"),
        (ScriptOption(("--no-cuda",), "no_cuda", "False", False, switch=True), "is_available()"),
        (ScriptOption(("--cudnn",), "cudnn", "False", False, switch=True), "is_available()"),
    ],
)
def test_a_script_that_is_told_to_stay_on_the_cpu(
    tmp_path: Path, option: ScriptOption, fix: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    outcome = TraceOutcome(status="finished", steps=3, seconds=1.0, message="", options=(option,))
    with pytest.raises(ScriptError, match="none of them on the GPU") as caught:
        require_step(Trace(outcome, None, ""), parse_command(["python", str(script)]))
    assert fix in str(caught.value)


def test_a_script_that_works_on_the_cpu_alone_without_an_optimizer(tmp_path: Path) -> None:
    """pytorch/examples' word language model trains by p.data.add_(): its run ends with its first
    backward passes, which is no end of the script."""
    script = tmp_path / "train.py"
    script.write_text("")
    option = ScriptOption(("--accel",), "accel", "False", False, switch=True)
    outcome = TraceOutcome(
        *("ended", 0, 42.0, ""), options=(option,), module_calls=140, gpu_operators=0
    )
    command = parse_command(["python", str(script)])
    with pytest.raises(ScriptError, match="140 module calls in 42 s, none of them on the") as it:
        require_step(Trace(outcome, None, ""), command)
    assert "give it its option --accel" in str(it.value)
    assert "the script ended" not in str(it.value)
    on_gpu = dataclasses.replace(outcome, gpu_operators=9)
    with pytest.raises(ScriptError, match="the script ended after 42 s without an optimizer"):
        require_step(Trace(on_gpu, None, ""), command)


def test_an_exception_that_a_logger_caught_is_why_the_script_ended(tmp_path: Path) -> None:
    """YOLOX's main() is wrapped in loguru's catch: "plan a command that trains", it was told."""
    script = tmp_path / "train.py"
    script.write_text("")
    command = parse_command(["python", str(script)])
    outcome = TraceOutcome("ended", 0, 5.0, "", gpu_operators=944, module_calls=354)
    output = (
        "2026-01-01 | ERROR | an error has been caught\nTraceback (most recent call last):\n\n"
        '> File "train.py", line 3, in main\n    total, used = text.split(",")\n\n'
        "ValueError: not enough values to unpack (expected 2, got 1)\n"
    )
    with pytest.raises(ScriptError, match=r"printed an exception \(ValueError: not enough") as it:
        require_step(Trace(outcome, None, output), command)
    assert "plan a command that trains" not in str(it.value)
    assert "its last lines are below" in str(it.value) and it.value.script_output
    with pytest.raises(ScriptError, match="plan a command that trains"):
        require_step(Trace(outcome, None, "epoch 1\n"), command)


def test_a_note_does_not_point_to_a_traceback_that_it_has_not(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    trace = Trace(TraceOutcome("failed", 0, 1.0, "ValueError: no"), None, "")
    with pytest.raises(ScriptError, match="first optimizer step; its traceback is below") as it:
        require_step(trace, parse_command(["python", str(script)]))
    assert it.value.in_note.endswith("before its first optimizer step")
    full = Trace(TraceOutcome("out_of_memory", 0, 1.0, ""), None, "")
    with pytest.raises(ScriptError) as it:
        require_step(full, parse_command(["python", str(script)]))
    assert it.value.in_note == str(it.value)


@pytest.mark.parametrize(
    ("refused", "meant"),
    [("--dataset-name stl10", "-dataset-name"), ("--batchSize=4", "--batch-size"), ("--c", "")],
)
def test_an_option_that_is_spelled_otherwise(tmp_path: Path, refused: str, meant: str) -> None:
    usage = "usage: run.py [-h] [-dataset-name {stl10,cifar10}]\n        [--batch-size N]\n"
    output = f"{usage}run.py: error: unrecognized arguments: {refused}\n"
    text = said(tmp_path, "exited", "exit code 2", output=output)
    assert (f"its parser calls the option {meant}, not --" in text) is bool(meant)
    assert ("its own message is below" in text) is (not meant)


def test_an_exception_that_a_framework_prints_before_it_exits(tmp_path: Path) -> None:
    """Hydra's, with what it says around it; a traceback that the script went on after is none of
    another cause."""
    output = (
        "Epoch: 1\nError executing job with overrides: []\nTraceback (most recent call last):\n"
        '  File "work.py", line 3, in <module>\n    import diffusers\n'
        "ModuleNotFoundError: No module named 'diffusers'\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "train.py", line 30, in main\n'
        "    cls = hydra.utils.get_class(cfg._target_)\n"
        "ImportError: Error loading 'work.Workspace':\n"
        "Are you sure that 'work' is importable?\n\n"
        "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n"
    )
    outcome = TraceOutcome(status="exited", steps=0, seconds=1.0, message="exit code 1")
    cause = cause_of(outcome, output)
    assert cause is not None and cause.title.startswith("diffusers is not installed")
    caught = TraceOutcome(status="ended", steps=0, seconds=1.0)  # robomimic prints it, and ends
    assert cause_of(caught, output) == cause
    assert cause_of(dataclasses.replace(caught, steps=3), output) is None
    assert cause_of(outcome, "usage: train.py [-h]\nerror: unknown option: --x\n") is None


def test_kernels_that_are_not_here_are_named_with_what_to_add() -> None:
    outcome = TraceOutcome("ended", 3, 1.0, imported=("triton", "flash_attn", "xformers"))
    assert absent_kernels(outcome).endswith("add --assume-installed flash_attn,xformers")
    assert absent_kernels(TraceOutcome("ended", 3, 1.0, imported=("triton",))) == ""


_END = "at an epoch's end"
_NO_KERNEL = "RuntimeError: No available kernel. Aborting execution."
_COUNTED = "RuntimeError: The size of tensor a (64) must match the size of tensor b (2048) at dim 0"


@pytest.mark.parametrize(
    ("message", "at", "subject"),
    [
        (_NO_KERNEL, _END, _END),
        (_NO_KERNEL, "", "after 4 steps"),
        (_COUNTED, _END, None),  # fewer predictions, for there were fewer batches
        (_COUNTED, "", "after 4 steps"),
        ("AssertionError: some are missing", "", None),
    ],
)
def test_what_ends_a_script_at_an_epochs_end(
    tmp_path: Path, message: str, at: str, subject: str | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    outcome = TraceOutcome(status="failed", steps=4, seconds=1.0, message=message)
    command = parse_command(["python", str(script)])
    found = fails_beyond(Trace(outcome, None, ""), command, at)
    assert [each.subject for each in found[1:]] == ([subject] if subject else [])
    assert not found or found[0].fixes


def test_a_message_has_no_colours_in_a_line() -> None:
    said = "UnpicklingError: do it \x1b[1monly if you trust\x1b[0m the source"
    what = what_happened(TraceOutcome("failed", 1, 1.0, message=said))
    assert what == "the script failed (UnpicklingError: do it only if you trust the source)"
