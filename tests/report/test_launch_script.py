"""The launch line as a script for a shell, Slurm and Docker: only what the plan knows."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest

import trainfit
from helpers_cli import ROOT
from helpers_cli import trainfit as run
from trainfit.cli.automation import LAUNCH
from trainfit.report.writers.launch_script import LaunchForm, LaunchScriptError, launch_script
from trainfit.results.changes import LaunchPart
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.loader import LoaderResult
from trainfit.results.plan import PlanResult
from trainfit.results.speed import DataLoading

FIXTURES = ROOT / "tests" / "fixtures" / "results"
MIB = 2**20


def plan(**changes: object) -> PlanResult:
    result = trainfit.load(FIXTURES / "plan-v1.json")
    assert isinstance(result, PlanResult)
    return dataclasses.replace(result, **changes)  # type: ignore[arg-type]


def loading(workers: int, shm_bytes: int | None, ram_bytes: int | None = None) -> DataLoading:
    """Of a DataLoader that was measured."""
    result = trainfit.load(FIXTURES / "loader-v1.json")
    assert isinstance(result, LoaderResult)
    settings = LoaderSettings(workers)
    candidate = dataclasses.replace(
        result.candidates[0], settings=settings, shm_bytes=shm_bytes, ram_bytes=ram_bytes
    )
    return DataLoading(
        dataclasses.replace(result, recommended=settings, candidates=(candidate,), confirmed=())
    )


@pytest.fixture(params=LAUNCH)
def form(request: pytest.FixtureRequest) -> LaunchForm:
    return request.param  # type: ignore[no-any-return]


def checked(script: str, folder: Path) -> str:
    """The script, which bash can read, and shellcheck where it is installed."""
    file = folder / "launch.sh"
    file.write_text(script)
    done = subprocess.run(["bash", "-n", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", file], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    return script


def test_the_options_are_the_forms() -> None:
    assert get_args(LaunchForm) == LAUNCH


def test_it_is_bash_with_the_launch_line_at_its_end(form: LaunchForm, tmp_path: Path) -> None:
    script = checked(launch_script(plan(), form), tmp_path)
    assert script.startswith("#!/usr/bin/env bash\n")
    assert "\nset -eu\n" in script and script.endswith("python tiny.py --batch_size=32\n")
    assert "# - batch_size=32: was 8: " in script and "82780 samples/s" in script


def test_text_of_the_user_is_no_code(form: LaunchForm, tmp_path: Path) -> None:
    evil = "it's\n$(touch pwned) `touch pwned`"
    part = LaunchPart("batch_size", "set", "argument", evil, "8", evil)
    by_hand = LaunchPart(
        "num_workers", "by hand", "script", "r", "4", "0", line=evil, place="a.py:1\nx"
    )
    words = r"""python 'my train.py' --name=$'a\nb' "--x=\$HOME" 'a # b'"""
    script = launch_script(
        plan(launch=words, command=words, gpu=evil, launch_parts=(part, by_hand)), form
    )
    checked(script, tmp_path)
    for line in script.splitlines():
        assert "pwned" not in line or line.startswith("#"), line
    # What the command gets is what the launch line says.
    for name in ("python", "docker"):
        fake = tmp_path / name
        fake.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s;" "$word"; done\n')
        fake.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", tmp_path / "launch.sh"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PATH": path, "IMAGE": "the/image"}, check=True,
    )  # fmt: skip
    assert done.stdout.endswith("my train.py;--name=a\nb;--x=$HOME;a # b;")
    assert not (tmp_path / "pwned").exists()


def test_changes_by_hand_come_first(form: LaunchForm, tmp_path: Path) -> None:
    part = LaunchPart(
        "num_workers", "by hand", "script", "…", "4", "0",
        line="num_workers=4", place="train.py:41", call="DataLoader",
    )  # fmt: skip
    script = checked(launch_script(plan(launch_parts=(part,)), form), tmp_path)
    assert "# - change train.py:41: DataLoader(…, num_workers=4)\n" in script


def test_slurm_gets_the_cores_of_the_workers_and_no_guess(tmp_path: Path) -> None:
    script = checked(
        launch_script(plan(loading=loading(3, 10 * MIB, 600 * MIB)), "sbatch"), tmp_path
    )
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert lines == [
        "#SBATCH --job-name=tiny", "#SBATCH --nodes=1", "#SBATCH --ntasks=1",
        "#SBATCH --gres=gpu:1", "#SBATCH --cpus-per-task=4",
    ]  # fmt: skip
    # Slurm reads no option behind the first command.
    assert script.index("#SBATCH --cpus") < script.index("set -eu")
    words = " ".join(script.replace("#   ", "").split())
    assert "Not known: --mem" in words and "workers need 600 MiB of it" in words
    assert "Not known: --time" in words and "3.08 ms" in words
    unknown = launch_script(plan(), "sbatch")
    assert "#SBATCH --cpus" not in unknown and "Not known: --cpus-per-task" in unknown
    odd = launch_script(plan(command="python 'a b;c.py'"), "sbatch")
    assert "#SBATCH --job-name=a_b_c" in odd


@pytest.mark.parametrize(
    ("shown", "option"),
    [
        (loading(4, 100 * MIB), "--shm-size 200m"),
        (loading(4, MIB), "--shm-size 64m"),  # Docker's own
        (loading(4, None), "--ipc host"),
        (None, "--ipc host"),  # not measured: it may have workers
        (loading(0, 0), ""),
    ],
)
def test_docker_gets_the_shared_memory_of_the_workers(
    shown: DataLoading | None, option: str, tmp_path: Path
) -> None:
    script = checked(launch_script(plan(loading=shown), "docker"), tmp_path)
    assert (
        (f"  {option} \\\n" in script) if option else not {"--shm", "--ipc"} & set(script.split())
    )


def test_docker_gets_variables_and_no_image_of_ours(tmp_path: Path) -> None:
    line = "OMP_NUM_THREADS=1 NAME='a b' /opt/venv/bin/python train.py"
    script = checked(launch_script(plan(launch=line), "docker"), tmp_path)
    assert "  -e OMP_NUM_THREADS=1 \\\n  -e NAME='a b' \\\n" in script
    assert script.endswith('  "$IMAGE" \\\n  /opt/venv/bin/python train.py\n')
    assert "# /opt/venv/bin/python is of this machine" in script
    unset = {name: value for name, value in os.environ.items() if name != "IMAGE"}
    done = subprocess.run(
        ["bash", tmp_path / "launch.sh"], env=unset, capture_output=True, text=True
    )
    assert done.returncode != 0 and "IMAGE: set it to the name of an image" in done.stderr


def test_a_job_that_does_not_fit_has_no_script(form: LaunchForm, tmp_path: Path) -> None:
    result = plan(amp_choice=None)
    full = dataclasses.replace(result.now, fits=False, largest_batch=0, recommended_batch=None)
    result = dataclasses.replace(result, now=full)
    with pytest.raises(LaunchScriptError, match=r"Does not fit: needs .* no launch line"):
        launch_script(result, form)
    result.save(tmp_path / "plan.json")
    done = run("show", "plan.json", "--format", form, cwd=tmp_path)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("trainfit: error: Does not fit")


def test_show_writes_them(tmp_path: Path) -> None:
    done = run("show", FIXTURES / "plan-v1.json", "--format", "sh", cwd=tmp_path)
    assert done.stdout == launch_script(plan(), "sh")
    done = run("show", FIXTURES / "plan-v1.json", "--format", "metrics", cwd=tmp_path)
    assert trainfit.load(FIXTURES / "plan-v1.json").metrics() == json.loads(done.stdout)
    for words in (["watch-v1.json", "--format", "sh"], ["plan-v1.json", "--format=sarif"],
                  ["plan-v1.json", "--format=sh", "--json"]):  # fmt: skip
        done = run("show", FIXTURES / words[0], *words[1:], cwd=tmp_path)
        assert done.returncode == 2 and not done.stdout, words
        assert len(done.stderr.splitlines()) == 1


def test_plan_writes_them(tmp_path: Path) -> None:
    script = ROOT / "tests" / "training_scripts" / "tiny.py"
    words = ["plan", "--gpu", "T4", "--steps", "2", "--format", "sbatch", "--", "python", script]
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    checked(done.stdout, tmp_path)
    assert "#SBATCH --job-name=tiny" in done.stdout
    done = run("plan", "--json", *words[1:], cwd=tmp_path)
    assert done.returncode == 2 and "--json and --format sbatch: give one" in done.stderr
