"""Which Python runs a command: one rule for all verbs, said in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers_cli import SCRIPTS, error_line, json_of, trainfit
from helpers_python import (
    calls,
    environment_with_torch,
    environment_without_torch,
    program,
    tool,
)
from trainfit.plan.command.parsing import parse_command

SCRIPT = SCRIPTS / "tiny.py"
VERBS = {
    "plan": ("plan", "--gpu", "RTX 4090"),
    "simulate": ("simulate", "--gpu", "RTX 4090"),
    "loader": ("loader", "--step-time", "5ms"),
    "rehearse": ("rehearse", "--step-time", "5ms"),
    "watch": ("watch",),
    "watch --verify": ("watch", "--verify"),
}


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A real Python without PyTorch, which is the one on PATH."""
    python = environment_without_torch(tmp_path / "bare")
    monkeypatch.setenv("PATH", f"{python.parent}:/usr/bin:/bin")
    return python


@pytest.mark.parametrize("verb", VERBS)
def test_a_python_that_does_not_exist_is_refused(verb: str, tmp_path: Path) -> None:
    done = trainfit(*VERBS[verb], "--", "python3.99", SCRIPT, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "program 'python3.99': there is no such program on PATH" in error_line(done)


@pytest.mark.parametrize("verb", ["plan", "simulate", "loader", "rehearse"])
def test_a_python_without_torch_is_refused_by_name(verb: str, bare: Path, tmp_path: Path) -> None:
    done = trainfit(*VERBS[verb], "--", "bare/bin/python", SCRIPT, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    number = ".".join(map(str, sys.version_info[:3]))
    assert f"bare/bin/python (Python {number}) has no torch; install it" in error_line(done)


def test_watch_runs_a_python_without_torch_as_it_is(bare: Path, tmp_path: Path) -> None:
    code = "import sys; print(sys.executable); sys.exit(3)"
    done = trainfit("watch", "--quiet", "--", bare, "-c", code, cwd=tmp_path)
    assert done.returncode == 3
    assert "has no torch: it runs as it is, with nothing to record" in done.stderr


@pytest.mark.parametrize("before", [(), ("nice", "-n", "5"), ("env", "A=1")])
@pytest.mark.parametrize("python", ["python", "train.py"])
def test_watch_looks_at_the_python_of_a_manager(
    before: tuple[str, ...], python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv's own way to say it is kept: the manager is started, with the words as they were typed."""
    environment_without_torch(tmp_path / ".venv")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (tmp_path / "train.py").write_text("")
    uv = tool(tmp_path / "bin" / "uv", "ran")
    monkeypatch.setenv("PATH", f"{uv.parent}:/usr/bin:/bin")
    command = ("uv", "run", *dict.fromkeys((python, "train.py")))
    done = trainfit("watch", "--quiet", "--", *before, *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/.venv/bin/python (Python 3." in done.stderr
    assert "has no torch: it runs as it is, with nothing to record" in done.stderr
    assert calls(uv) == [" ".join(command[1:])]


def test_plain_python_gives_way_in_every_verb(bare: Path, tmp_path: Path) -> None:
    said = f"has no torch: trainfit's own Python ({sys.executable}) runs the command; activate"
    words = (*VERBS["simulate"], "--json", "--", "python", SCRIPT)
    done = trainfit(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"trainfit: python ({bare}, " in done.stderr and said in done.stderr
    code = "import sys; print(sys.executable)"
    watched = trainfit("watch", "--quiet", "--", "python", "-c", code, cwd=tmp_path, PYTHONUTF8="1")
    assert watched.returncode == 0, watched.stderr
    assert watched.stdout == f"{sys.executable}\n" and said in watched.stderr


@pytest.mark.slow
def test_a_plan_notes_it_and_keeps_the_word(bare: Path, tmp_path: Path) -> None:
    words = (*VERBS["plan"], "--no-loader", "--json", "--", "python", SCRIPT)
    done = trainfit(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json_of(done)
    assert document["launch"].startswith("python ")
    assert any("trainfit's own Python" in note for note in document["notes"])


def test_another_environment_runs_with_trainfits_code_and_its_own_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has PyTorch and no trainfit; a manager's words stay, and the manager is not started."""
    python = environment_with_torch(tmp_path / ".venv")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (tmp_path / "train.py").write_text(
        "import importlib.util, sys, torch\n"
        f"assert sys.executable == {str(python)!r}\n"
        "assert importlib.util.find_spec('rich') is None\n"
        "model = torch.nn.Linear(4, 4).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "while True:\n"
        "    model(torch.ones(8, 4, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
    )
    uv = tool(tmp_path / "bin" / "uv")
    monkeypatch.setenv("PATH", f"{uv.parent}:/usr/bin:/bin")
    before = sorted(tmp_path.rglob("*"))
    words = ("simulate", "--gpu", "RTX 4090", "--steps", "1", "--output", "/dev/null", "--json")
    done = trainfit(*words, "--", "nice", "uv", "run", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"run by the Python of uv run ({python}, Python 3." in done.stderr
    assert json.loads(done.stdout)
    assert calls(uv) == []
    assert {each for each in tmp_path.rglob("*") if "__pycache__" not in each.parts} == set(before)


@pytest.mark.slow
def test_watch_records_in_another_environment(tmp_path: Path) -> None:
    """It lacks trainfit and a module that the recorder needs."""
    python = environment_with_torch(tmp_path / "venv")
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for batch in torch.utils.data.DataLoader(torch.ones(64, 4), 4):\n"
        "    model(batch).sum().backward()\n"
        "    optimizer.step()\n"
    )
    words = ("watch", "--quiet", "--json", "--folder", "run", "--", python, "train.py")
    done = trainfit(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json_of(done)["steps"] >= 1 and "not recorded" not in done.stderr


def test_a_program_that_hides_behind_pyenv_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shims are shell scripts that look for the program of the version in use."""
    real = program(tmp_path / "versions" / "fit", f"#!{sys.executable}\n")
    program(tmp_path / "shims" / "fit", '#!/bin/sh\nexec pyenv exec fit "$@"\n')
    program(tmp_path / "bin" / "pyenv", f"#!/bin/sh\n[ $1 = which ] && echo {real}\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:{tmp_path / 'bin'}:/usr/bin:/bin")
    assert parse_command(["fit"]).name == str(real)
    done = subprocess.run(["sh", "-c", "command -v fit"], capture_output=True, text=True)
    assert done.stdout == f"{tmp_path / 'shims' / 'fit'}\n"
