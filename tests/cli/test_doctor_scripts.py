"""`trainfit doctor --script` with several scripts, alone, and as a hook of pre-commit."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from helpers_cli import ROOT, environment, json_of, trainfit
from helpers_machines import MACHINES

PARALLEL = "model = torch.nn.DataParallel(torch.nn.Linear(2, 2))\n"
ALONE = ("doctor", "--only", "script", "--script")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(f"import torch\nimport net\n{PARALLEL}")
    (tmp_path / "net.py").write_text(f"import torch\n{PARALLEL}")
    (tmp_path / "plain.py").write_text("import os\nprint(os.name)\n")
    (tmp_path / "broken.py").write_text("x = (\n")
    return tmp_path


def test_scripts_are_read_together(folder: Path) -> None:
    done = trainfit(*ALONE, "train.py", "net.py", "plain.py", cwd=folder)
    assert done.returncode == 1 and not done.stderr
    first = "Script train.py and 2 more scripts: 2 findings in 2 files; 3 files read"
    assert done.stdout.splitlines()[0] == first
    # Named once, though one script imports the other.
    assert done.stdout.count("data-parallel: net.py:2:9") == 1
    assert "GPU in this machine" not in done.stdout


def test_files_without_pytorch_are_silent(folder: Path) -> None:
    done = trainfit(*ALONE, "plain.py", cwd=folder)
    assert done.returncode == 0 and not done.stderr
    assert done.stdout == "Script plain.py: nothing found; 1 file read\n"


def test_a_script_that_cannot_be_read_hides_no_finding(folder: Path) -> None:
    done = trainfit(*ALONE, "broken.py", "net.py", cwd=folder)
    assert done.returncode == 2
    assert "data-parallel: net.py:2:9" in done.stdout
    assert done.stderr.startswith("trainfit: error: script 'broken.py': syntax error at line 1")
    alone = trainfit(*ALONE, "broken.py", cwd=folder)
    assert alone.returncode == 2 and not alone.stdout


def test_with_the_machine_they_are_one_result(folder: Path) -> None:
    words = ["doctor", "--only", "files", "--json", "--script", "net.py", "train.py"]
    done = trainfit(*words, "--machine", MACHINES / "workstation.json", cwd=folder)
    assert done.returncode == 1
    script = json_of(done)["script"]
    assert script["script"] == "net.py and 1 more script" and len(script["findings"]) == 2
    assert set(script["files"]) == {"net.py", "train.py"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "script"], "name the scripts"),
        (["--format", "sarif"], "name the scripts"),
        (["--format", "sarif", "--output", "o.json", "--script", "net.py"], "--output is about"),
        (["--only", "script", "--json", "--script", "net.py"], "--json is about the machine"),
    ],
)
def test_what_has_no_meaning_is_refused(words: list[str], said: str, folder: Path) -> None:
    done = trainfit("doctor", *words, cwd=folder)
    assert done.returncode == 2 and said in done.stderr and not done.stdout


def test_the_hook_is_a_command_of_ours(folder: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["id"] == "trainfit-doctor" and hook["types"] == ["python"]
    program, *words = hook["entry"].split()
    assert program == "trainfit"
    assert trainfit(*words, "net.py", "plain.py", cwd=folder).returncode == 1
    assert trainfit(*words, "plain.py", cwd=folder).returncode == 0


@pytest.mark.slow
def test_pre_commit_runs_the_hook(folder: Path) -> None:
    if importlib.util.find_spec("pre_commit") is None:
        pytest.skip("pre-commit is not installed")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = environment(PATH=path, PRE_COMMIT_HOME=str(folder / "cache"))
    subprocess.run(["git", "init", "-q", "."], cwd=folder, check=True)
    subprocess.run(["git", "add", "net.py", "plain.py"], cwd=folder, check=True)
    for file, code in (("net.py", 1), ("plain.py", 0)):
        words = ["-m", "pre_commit", "try-repo", str(ROOT), "trainfit-doctor", "--files", file]
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=variables, capture_output=True, text=True
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert ("data-parallel" in done.stdout) is bool(code)
