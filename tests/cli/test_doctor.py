"""`trainfit doctor` as a user runs it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from helpers_cases import some_of
from helpers_cli import ROOT, error_line, json_of
from helpers_cli import trainfit as run
from helpers_machines import document, mutated, names
from trainfit.doctor.checks import NAMES, diagnose
from trainfit.hardware.machine.recorded import RecordedSystem
from trainfit.hardware.machine.survey import survey
from trainfit.results.doctor import DoctorResult

MACHINES = ROOT / "tests" / "machines"


def test_this_machine(tmp_path: Path) -> None:
    done = run("doctor", "--json", "--output", "d.json", "--record", "m.json", cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    assert done.stderr == ""
    result = DoctorResult.from_json(done.stdout, Path("-"))
    assert {check.name for check in result.checks} <= set(NAMES)
    assert result.checks[0].name == "gpu"
    assert result.machine.cpu.logical_cpus.value == os.cpu_count()
    assert done.returncode == (1 if result.is_bad else 0)

    shown = run("show", "d.json", cwd=tmp_path)
    assert shown.returncode == 0 and shown.stdout.startswith(f"{_count(result, 'bad')} bad, ")
    assert json_of(run("show", "--json", "d.json", cwd=tmp_path)) == json.loads(done.stdout)

    # What was recorded replays to the same verdicts.
    again = run("doctor", "--json", "--machine", "m.json", cwd=tmp_path)
    replay = DoctorResult.from_json(again.stdout, Path("-"))
    assert [(c.name, c.verdict, c.cause) for c in replay.checks] == [
        (c.name, c.verdict, c.cause) for c in result.checks
    ]


def _count(result: DoctorResult, verdict: str) -> int:
    return sum(check.verdict == verdict for check in result.checks)


@pytest.mark.parametrize("name", ["workstation", "driver-too-old", "container-quota"])
def test_a_recorded_machine(name: str, tmp_path: Path) -> None:
    done = run("doctor", "--explain", "--machine", MACHINES / f"{name}.json", cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    cause = document(name)["expected_cause"]
    assert (f"cause       {cause}" if cause else "Good checks\n  gpu  ") in done.stdout


def test_only_and_skip(tmp_path: Path) -> None:
    words = ("doctor", "--json", "--machine", MACHINES / "workstation.json")
    only = json_of(run(*words, "--only", "gpu,shm", cwd=tmp_path))
    assert [check["name"] for check in only["checks"]] == ["gpu", "shm"]
    rest = json_of(run(*words, "--skip", "gpu,shm", cwd=tmp_path))
    assert not {"gpu", "shm"} & {check["name"] for check in rest["checks"]}


def test_exit_code_0_where_nothing_is_bad(tmp_path: Path) -> None:
    words = ("doctor", "--machine", MACHINES / "workstation.json", "--only", "gpu")
    assert run(*words, cwd=tmp_path).returncode == 0


HEALTHY = MACHINES / "workstation.json"


def test_a_script_is_read_beside_the_machine(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nmodel = torch.nn.DataParallel(torch.nn.Linear(2, 2))\n"
    )
    done = run(
        "doctor", "--script", "train.py", "--only", "gpu", "--machine", HEALTHY, cwd=tmp_path
    )
    assert done.returncode == 1
    assert "train.py:2" in done.stdout and "data-parallel" in done.stdout


# hardware/driver/test_gpus.py has the same of the reader.
@pytest.mark.slow
def test_a_hanging_nvidia_smi_holds_nothing_up(tmp_path: Path) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\ntrap '' TERM INT HUP\nwhile :; do sleep 600; done\n")
    command.chmod(0o755)
    began = time.monotonic()
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PATH', '')}"
    done = run("doctor", "--only", "gpu", cwd=tmp_path, PATH=path)
    assert done.returncode in (0, 1), done.stderr
    assert time.monotonic() - began < 120  # not the 600 s of what hangs


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--only", "gpus"], "unknown check 'gpus'; available: gpu, "),
        (["--skip", ",".join(NAMES)], "leave no check"),
        (["--machine", "missing.json"], "'missing.json': there is no such file"),
        (["--machine", "text.json"], "'text.json': it is not a recorded machine"),
        (["--script", "missing.py"], "missing.py"),
        (["--script", "broken.py"], "broken.py"),
        (["--output", "no/folder.json"], "its folder does not exist"),
        (["--record", "a.json", "--machine", "b.json"], "remove --machine"),
        (["--data", "no-such-folder"], "no-such-folder"),
    ],
)
def test_bad_input_is_one_line(words: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "broken.py").write_text("def f(:\n")
    done = run("doctor", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert expected in error_line(done)
    assert done.stdout == ""


@pytest.mark.parametrize("seed", some_of(range(100), 10))
def test_a_damaged_machine_gives_verdicts(seed: int) -> None:
    name = names()[seed % len(names())]
    damaged = mutated(document(name), seed)
    facts = survey(RecordedSystem(damaged))
    assert "trainfit failed" not in repr(facts)
    checks = diagnose(facts)
    assert checks[0].name == "gpu"
    result = DoctorResult(checks, facts, None, 0.0, "test")
    assert DoctorResult.from_json(result.to_json(), Path("-")) == result
