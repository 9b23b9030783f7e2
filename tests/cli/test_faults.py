"""Whose fault a failure is, as a user sees it: exit code 70 for trainfit's own."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from helpers_cases import slow_but
from helpers_cli import ROOT, environment, error_line, trainfit
from helpers_machines import MACHINES
from trainfit.cli import bug_report
from trainfit.cli.verbs import doctor
from trainfit.version import ISSUES, __version__

#: Breaks what every simulated run goes through, as a newer PyTorch would.
BROKEN = """
import torch
from trainfit.simgpu.device import recorder
recorder.RecordingBuilder.malloc = None
"""
#: Imported by every Python process: fails before the script runs.
FAILS_TO_START = """
import sys
if any(word.endswith("request.json") for word in sys.orig_argv):
    from trainfit.scripts.dataloader import LoaderTracker
    LoaderTracker.install = None
"""
SCRIPTS = {
    "in the script's call": BROKEN + "torch.zeros(3).cuda()\n",
    "wrapped by the script": BROKEN
    + "try:\n    torch.zeros(3).cuda()\nexcept TypeError as error:\n"
    "    raise RuntimeError('my model failed') from error\n",
}


def report_of(done: subprocess.CompletedProcess[str], folder: Path) -> tuple[list[str], str]:
    """The three lines, and the traceback that was kept below ``folder``, the state folder."""
    lines = [line for line in done.stderr.splitlines() if not line.endswith(" …")]
    assert done.returncode == 70, done.stderr
    assert len([line for line in lines if "the recording so far" not in line]) == 3, done.stderr
    assert lines[0].startswith("trainfit: internal error: ") and "fault is trainfit's" in lines[0]
    for part in (f"trainfit {__version__}", "Python 3.", "PyTorch 2.", "Linux"):
        assert part in lines[1]
    assert f"report it at {ISSUES}, with " in lines[2]
    (file,) = (folder / "trainfit" / "errors").iterdir()
    assert str(file) in lines[2]
    return lines, file.read_text()


@pytest.mark.parametrize("script", SCRIPTS)
def test_of_the_simulated_device(script: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPTS[script])
    words = ["plan", "--gpu", "T4", "--", "python", "train.py"]
    done = trainfit(*words, cwd=tmp_path, XDG_STATE_HOME=str(tmp_path))
    lines, kept = report_of(done, tmp_path)
    assert "TypeError: 'NoneType' object is not callable at trainfit/simgpu/device/" in lines[0]
    assert "Traceback" not in done.stderr and 'File "train.py"' in kept


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb",
    # All kinds of run tell of a fault by the same code, and this one imports the least.
    slow_but(["simulate --gpu T4", LOADER := "loader --step-time 1ms --"], LOADER),
)
def test_before_the_script_runs(verb: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\ntorch.zeros(3).cuda()\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FAILS_TO_START)
    path = f"{tmp_path / 'site'}:{environment()['PYTHONPATH']}"
    words = [*verb.split(), *(["python"] if verb.endswith("--") else []), "train.py"]
    done = trainfit(*words, cwd=tmp_path, XDG_STATE_HOME=str(tmp_path), PYTHONPATH=path)
    lines, kept = report_of(done, tmp_path)
    place = "loader/child.py" if verb.startswith("loader") else "scripts/trace_run.py"
    assert f"object is not callable at trainfit/{place}:" in lines[0], lines
    assert "in main" in kept


def test_of_a_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise KeyError("one\ntwo")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "diagnose", fails)
    from trainfit.cli.main import main

    assert main(["doctor", "--machine", str(MACHINES / "workstation.json")]) == 70
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and "KeyError: 'one\\ntwo' at trainfit/cli/verbs/doctor.py:" in said[0]
    (file,) = (tmp_path / "trainfit" / "errors").iterdir()
    assert "in run" in file.read_text()


def test_the_traceback_is_never_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = bug_report.OwnFault("ValueError: x", "trainfit/a.py:1", "Traceback …\nValueError: x")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file" / "state"))
    (tmp_path / "file").touch()
    assert bug_report.report_fault(fault) == 70
    said = capsys.readouterr().err
    assert said.endswith("with the traceback below\nTraceback …\nValueError: x\n")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert bug_report.report_fault(fault) == 70
    assert len(capsys.readouterr().err.splitlines()) == 3
    monkeypatch.setenv("TRAINFIT_LOG", "debug")
    assert bug_report.report_fault(fault) == 70
    assert capsys.readouterr().err.endswith(".txt\nTraceback …\nValueError: x\n")


#: A script that fails by itself, and what is said of it.
FAILING = {
    "a shape": (
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(9, 2))\n"
        "model.cuda()(torch.zeros(3, 4).cuda())\n",
        # PyTorch 2.15 begins it with "addmm: ".
        "mat1 and mat2 shapes cannot be multiplied",
    ),
    "a wrong argument": (
        "import torch\nx = torch.zeros(3).cuda()\ntorch.add(x, 'a')\n",
        "failed at train.py:3 (TypeError: add(): argument 'other'",
    ),
    "a dimension": (
        "import torch\ntorch.zeros(3).cuda().sum(7)\n",
        "failed at train.py:2 (IndexError: Dimension out of range",
    ),
    "two devices": (
        "import torch\ntorch.nn.Linear(4, 8).cuda()(torch.zeros(3, 4))\n",
        "move all tensors of that line to one device",
    ),
    "its own error": (
        "def f():\n    raise ValueError('bad\\nthing')\n"
        "try:\n    {}['a']\nexcept KeyError:\n    f()\n",
        "failed at train.py:2 (ValueError: bad thing)",
    ),
}


#: A failing operator is told like "a shape".
_SLOW = ("a wrong argument", "a dimension")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) if case in _SLOW else case for case in FAILING],
)
def test_of_the_script(case: str, tmp_path: Path) -> None:
    text, said = FAILING[case]
    (tmp_path / "train.py").write_text(text)
    done = trainfit("plan", "--gpu", "T4", "--", "python", "train.py", cwd=tmp_path)
    assert done.returncode == 2 and said in error_line(done)
    shown = done.stderr.partition("--- the script's own output ---\n")[2]
    assert "Traceback (most recent call last):\n" in shown
    files = [line for line in shown.splitlines() if line.startswith("  File ")]
    assert files[0].startswith('  File "train.py"') and not any("src/trainfit" in f for f in files)


@pytest.mark.parametrize(
    ("text", "said", "shown"),
    [
        # Each word of the others is said of one of the rest, too.
        pytest.param(
            *("import sys; sys.exit(3)", "exited with exit code 3", "printed nothing"),
            marks=pytest.mark.slow,
        ),
        ("import sys; sys.exit('no data')", "exit code 1 (no data)", "that is all it printed"),
        ("import os; os._exit(4)", "exit code 4 (os._exit at train.py:1)", "printed nothing"),
        ("import sys; print('hello'); sys.exit(3)", "exit code 3", "its own message is below"),
        pytest.param(
            *("import os; os.system('echo hello'); os.abort()", "killed by SIGABRT"),
            "last lines are below",
            marks=pytest.mark.slow,
        ),
        ("def f(:", "SyntaxError: invalid syntax (train.py, line 1)", "fix that line"),
    ],
)
def test_a_script_that_ends_by_itself(text: str, said: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    done = trainfit("plan", "--gpu", "T4", "--", "python", "train.py", cwd=tmp_path)
    line = error_line(done)
    assert done.returncode == 2 and said in line and shown in line
    output = done.stderr.partition("--- the script's own output ---\n")[2]
    assert ("below" in shown) == bool(output) and ("hello" in text) == ("hello" in output)


def test_the_package_names_the_same_issue_page() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    assert ISSUES in urls.values() or not urls
