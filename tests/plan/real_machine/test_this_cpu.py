"""How fast a core of this machine dispatches operators."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_cli import SCRIPTS, json_of, trainfit
from trainfit.plan import this_cpu
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.command.tunables import CommandError
from trainfit.plan.this_cpu import measured_cpu
from trainfit.speed import dispatch_probe

TRAIN = ("python", str(SCRIPTS / "train.py"))


@pytest.mark.slow
def test_a_core_is_measured_in_the_commands_interpreter() -> None:
    cpu = measured_cpu(parse_command(TRAIN))
    assert cpu.core_hz is None and cpu.cores is not None and cpu.cores > 0
    # Any machine that runs tests: within a factor of ten of the reference.
    assert cpu.core_speed is not None and 0.1 < cpu.core_speed < 10


def test_a_probe_has_trials_enough_however_short_it_is() -> None:
    assert 1e-7 < dispatch_probe.operator_seconds(0.0) < 1e-3


def test_an_interpreter_without_pytorch_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_cpu, "_LIMIT_S", 20.0)
    command = parse_command(["TORCH_BLAS_PREFER_CUBLASLT=1", "python", "-S", *TRAIN[1:]])
    with pytest.raises(CommandError, match=r"--cpu here: PyTorch does not run in .*ghz=3.5"):
        measured_cpu(command)


@pytest.mark.slow
def test_a_plan_says_that_its_launches_were_measured(tmp_path: Path) -> None:
    words = ("plan", "--gpu=T4", "--cpu=here", "--no-remedies", "--json", "--")
    result = json_of(trainfit(*words, *TRAIN, "--batch_size={batch_size:4}", cwd=tmp_path))
    assert result["cpu"]["core_speed"] > 0 and result["cpu"]["cores"] > 0
    assert "measured CPU" in result["speed"]["constants"]


def test_what_is_no_processor_is_refused(tmp_path: Path) -> None:
    done = trainfit("plan", "--gpu=T4", "--cpu=there", "--", *TRAIN, cwd=tmp_path)
    assert done.returncode == 2
    said = "expected cores=2,ghz=2.2,kind=skylake, some of its fields, or here, got 'there'"
    assert said in done.stderr and "Traceback" not in done.stderr
