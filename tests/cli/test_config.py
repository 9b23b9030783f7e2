"""Defaults of options from trainfit.toml and pyproject.toml."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from helpers_cli import ROOT, trainfit
from trainfit.cli.parser import read_words

PLAN = ROOT / "tests" / "fixtures" / "results" / "plan-v1.json"
GIB = 2**30


def options(folder: Path, *words: str) -> argparse.Namespace:
    """Those of a command line in the folder."""
    with mock.patch.object(Path, "cwd", lambda: folder):
        return read_words(words)[1]


def write(folder: Path, text: str, name: str = "trainfit.toml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder


def test_values_have_the_types_of_their_options(tmp_path: Path) -> None:
    text = """
    gpu = "RTX 4090"
    time-limit = 90
    other_processes = "2GiB"
    [plan]
    headroom = "10%"
    steps = 4
    explain = true
    remedies = true
    fail-if = ["device > 22GiB", "step > 1s"]
    cpu = "cores=2,ghz=3"
    [pace]
    hz = [15, 30]
    [rehearse]
    pin-memory = false
    num_workers = 0
    """
    folder = write(tmp_path, text)
    found = options(folder, "plan", "--", "python", "train.py")
    assert (found.gpu, found.time_limit, found.steps) == ("RTX 4090", 90.0, 4)
    assert (found.other_processes, found.headroom) == (2 * GIB, pytest.approx(0.1))
    assert (found.explain, found.remedies, found.json) == (True, "all", False)
    assert [each.limit for each in found.fail_if] == [22 * GIB, 1.0]
    assert found.cpu.cores == 2
    found = options(folder, "pace", "x.py:f")
    assert found.hz == (15.0, 30.0)
    found = options(folder, "rehearse", "--", "python", "train.py")
    assert (found.gpu, found.pin_memory, found.num_workers) == ("RTX 4090", False, 0)


def test_the_command_line_goes_first(tmp_path: Path) -> None:
    folder = write(tmp_path, 'gpu = "T4"\n[plan]\nfail-if = "step > 1s"\nremedies = "all"\n')
    words = ["plan", "--gpu=A100", "--no-remedies", "--fail-if", "device > 1GiB", "--", "python"]
    found = options(folder, *words)
    assert (found.gpu, found.remedies, found.no_remedies) == ("A100", None, True)
    assert [each.text for each in found.fail_if] == ["device > 1GiB"]
    # Words of the user's command are his.
    assert options(folder, "plan", "--", "python", "x.py", "--gpu", "A100").gpu == "T4"


def test_a_verbs_table_goes_before_what_is_for_all(tmp_path: Path) -> None:
    text = 'gpu = "T4"\nloader = true\n[plan]\ngpu = "A100"\nno-loader = true\n'
    folder = write(tmp_path, text)
    found = options(folder, "plan", "--", "python")
    assert (found.gpu, found.loader, found.no_loader) == ("A100", False, True)
    assert options(folder, "simulate", "x.py").gpu == "T4"


def test_the_nearest_file_counts_and_its_paths_are_relative_to_it(tmp_path: Path) -> None:
    write(tmp_path, '[tool.trainfit]\ngpu = "T4"\nprofile = "gpu.json"\n', "pyproject.toml")
    inner = write(tmp_path / "a" / "b", "[tool.other]\nx = 1\n", "pyproject.toml")
    found = options(inner, "plan", "--", "python")
    assert (found.gpu, found.profile) == ("T4", tmp_path / "gpu.json")
    write(tmp_path / "a", 'profile = "gpu.json"\n')
    found = options(inner, "plan", "--", "python")
    assert (found.gpu, found.profile) == (None, tmp_path / "a" / "gpu.json")
    assert options(tmp_path / "a", "plan", "--", "python").profile == Path("gpu.json")
    write(tmp_path, 'gpu = "A100"\n')  # goes before pyproject.toml of the same folder
    assert options(tmp_path, "plan", "--", "python").gpu == "A100"
    write(tmp_path, 'price = "gpuhunt"\n')
    assert options(tmp_path, "gpus", "--for", "x").price == Path("gpuhunt")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('gpuu = "T4"', "unknown key 'gpuu'; did you mean 'gpu'?"),
        ("[plam]\nsteps = 3", "unknown key [plam]; did you mean 'plan'?"),
        ("[plan]\nstep = 3", "unknown key 'step' in [plan]; did you mean 'steps'?"),
        ("[plan]\nhz = 30", "unknown key 'hz' in [plan]"),
        ("[plan]\nhelp = true", "unknown key 'help' in [plan]"),
        ("[plan]\nsteps = 0", "steps = 0: expected a positive integer, got '0'"),
        ("[plan]\nsteps = true", "steps = True: expected a string or a number"),
        ("[plan]\ngpu = ['T4']", "gpu = ['T4']: expected a string or a number"),
        ("[plan]\nexplain = 1", "explain = 1: expected true or false"),
        ("[plan]\nfail-if = 'x > 1'", "this result has no 'x'"),
        ("[plan]\nloader = true\nno-loader = true", "[plan] has loader and no-loader: keep one"),
        ("gpu = ", "Invalid value"),
        ("[plan]\nallow-writes = true", "'allow-writes' in [plan] is for the command line alone"),
        ("allow_writes = true", "'allow_writes' is for the command line alone"),
        ("[pace]\nfix = 'spin'\n[plan]\nfix = 'spin'", "'fix' in [plan] is for the command line"),
    ],
)
def test_what_no_option_takes_is_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    done = trainfit("plan", "--", "python", "train.py", cwd=write(tmp_path, text))
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("trainfit: error: trainfit.toml: ") and said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_choice_is_checked(tmp_path: Path) -> None:
    folder = write(tmp_path, '[rehearse]\nstart-method = "magic"\n')
    done = trainfit("rehearse", "--", "python", "x.py", cwd=folder)
    assert done.returncode == 2 and "expected one of fork, spawn, forkserver" in done.stderr


def test_keys_of_other_verbs_are_for_them(tmp_path: Path) -> None:
    folder = write(tmp_path, "hz = 30\n[pace]\nduration = 'nonsense'\n")
    done = trainfit("show", PLAN, cwd=folder)
    assert done.returncode == 0 and not done.stderr


def test_a_default_that_came_from_a_file_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, "fail-if = 'device > 1MiB'\nexplain = true\n")
    done = trainfit("show", PLAN, "--explain", cwd=folder)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "trainfit: fail-if from trainfit.toml"
    assert not trainfit("show", PLAN, cwd=write(tmp_path / "b", "[plan]\nsteps = 3\n")).stderr


def test_another_file_is_named_by_a_variable(tmp_path: Path) -> None:
    write(tmp_path, "nonsense = 1\n")
    write(tmp_path, "explain = true\n", "other.toml")
    words: list[Any] = ["show", PLAN]
    none = trainfit(*words, cwd=tmp_path, TRAINFIT_CONFIG="")
    assert none.returncode == 0 and not none.stderr
    other = trainfit(*words, cwd=tmp_path, TRAINFIT_CONFIG="other.toml")
    assert other.stderr == "trainfit: explain from other.toml\n"
    missing = trainfit(*words, cwd=tmp_path, TRAINFIT_CONFIG="missing.toml")
    assert missing.returncode == 2 and "missing.toml: No such file" in missing.stderr


def test_a_file_that_another_user_put_into_a_shared_folder_is_left_alone(tmp_path: Path) -> None:
    folder = write(tmp_path, "nonsense = 1\n")
    folder.chmod(0o1777)
    others = mock.patch("os.getuid", lambda: 12345)
    real = Path.stat

    def stat(path: Path, **options: Any) -> Any:
        found = real(path, **options)
        return mock.Mock(wraps=found, st_uid=4242, st_mode=found.st_mode)

    with others, mock.patch.object(Path, "stat", stat):
        done = trainfit("show", PLAN, cwd=folder)
    assert done.returncode == 0
    assert done.stderr == "trainfit: trainfit.toml is not read: another user put it there\n"


def test_a_broken_project_file_without_trainfit_is_no_matter(tmp_path: Path) -> None:
    write(tmp_path, "[broken", "pyproject.toml")
    assert trainfit("show", PLAN, cwd=tmp_path).returncode == 0
    write(tmp_path, "[tool.trainfit", "pyproject.toml")
    done = trainfit("show", PLAN, cwd=tmp_path)
    assert done.returncode == 2 and "leave it out by TRAINFIT_CONFIG=" in done.stderr


def test_help_reads_no_file(tmp_path: Path) -> None:
    done = trainfit("plan", "--help", cwd=write(tmp_path, "nonsense = 1\n"))
    assert done.returncode == 0 and isinstance(done, subprocess.CompletedProcess)
