"""action.yml: what its steps run, as a runner of GitHub would."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers_cli import ROOT, SCRIPTS, environment

ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
PLAN = STEPS[-1]


def test_it_is_a_composite_action() -> None:
    """As GitHub's metadata syntax has it (checked with check-jsonschema when it was written)."""
    assert ACTION["runs"]["using"] == "composite" and ACTION["name"] and ACTION["description"]
    for step in STEPS:
        assert step["shell"] == "bash" and step["run"]
    for name, given in ACTION["inputs"].items():
        assert given["description"] and ("default" in given) is not given.get("required", False)
        assert isinstance(given.get("default", ""), str), name
    for value in ACTION["outputs"].values():
        assert re.fullmatch(r"\$\{\{ steps\.plan\.outputs\.\w+ \}\}", value["value"])


def test_no_input_is_part_of_a_script() -> None:
    """What a pull request may name would be run."""
    named = set()
    for step in STEPS:
        assert "${{" not in step["run"]
        for value in step.get("env", {}).values():
            named |= set(re.findall(r"\$\{\{ inputs\.([\w-]+) \}\}", value))
    assert named | {"install", "working-directory"} == set(ACTION["inputs"])


def ran(
    folder: Path, command: str, fail_if: str = "", **more: str
) -> tuple[subprocess.CompletedProcess[str], str, dict[str, str]]:
    """The step "Plan" with these inputs: how it ended, the summary, the outputs."""
    inputs = {name: given.get("default", "") for name, given in ACTION["inputs"].items()}
    inputs |= {"command": command, "fail-if": fail_if, "gpu": "T4", "options": "--no-loader "
               "--steps 2", **more}  # fmt: skip
    values = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: inputs[found[1]], value)
        for name, value in PLAN["env"].items()
    }
    (folder / "step.sh").write_text(PLAN["run"])
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / "trainfit"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trainfit "$@"\n')
    program.chmod(0o755)
    (folder / "bin" / "python").unlink(missing_ok=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    summary, outputs = folder / "summary", folder / "outputs"
    for file in (summary, outputs):
        file.write_text("")
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "step.sh"],
        cwd=folder,
        env=environment(
            **values,
            PATH=f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            GITHUB_STEP_SUMMARY=str(summary),
            GITHUB_OUTPUT=str(outputs),
        ),
        capture_output=True,
        text=True,
    )
    lines = (line.partition("=") for line in outputs.read_text().splitlines())
    return done, summary.read_text(), {name: value for name, _, value in lines}


def test_what_is_no_condition_is_an_error_without_a_summary(tmp_path: Path) -> None:
    done, summary, outputs = ran(tmp_path, "python train.py", "devise > 1GiB")
    assert done.returncode == 2 and "devise" in done.stderr
    assert not summary and not outputs


# Conditions are judged in test_fail_if.py, and the test above runs the step's shell.
@pytest.mark.slow
def test_a_plan_is_made_and_judged(tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / "tiny.py", tmp_path / "my train.py")
    command = "python 'my train.py' --batch_size={batch_size:8}"
    conditions = "device > 1MiB\n\n  step > 100s\n"
    done, summary, outputs = ran(tmp_path, command, conditions)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("Fits: ") and "--fail-if 'device > 1MiB': it is" in done.stderr
    assert summary.startswith("# ") and "- failed: --fail-if 'device > 1MiB': it is " in summary
    assert "step > 100s" not in summary
    assert outputs["plan"] == "trainfit-plan.json"
    assert json.loads(outputs["metrics"])["trainfit/device_gib"] > 0
    saved = (tmp_path / "trainfit-plan.json").read_bytes()
    # What is no condition is an error, and no summary of the former plan.
    done, summary, outputs = ran(tmp_path, command, "devise > 1GiB")
    assert done.returncode == 2 and not summary and not outputs
    assert (tmp_path / "trainfit-plan.json").read_bytes() == saved


@pytest.mark.slow
def test_a_plan_that_is_good(tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / "tiny.py", tmp_path / "train.py")
    done, summary, outputs = ran(tmp_path, "python train.py", "device > 10GiB", output="o.json")
    assert done.returncode == 0, done.stderr
    assert "failed: " not in summary and outputs["plan"] == "o.json"
