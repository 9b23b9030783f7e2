"""``uv run``, ``conda run`` and the like: whose Python they have, and that nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers_commands import parse, refused
from helpers_python import answering, calls, program, tool
from trainfit.plan.command import environments

NAMES = ("uv", "poetry", "pdm", "hatch", "pipenv", "pixi", "conda", "mamba", "micromamba")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project's folder, in which nothing may change; the tools only note that they are asked."""
    folder = tmp_path / "project"
    (folder / "code").mkdir(parents=True)
    (folder / "train.py").write_text("")
    (folder / "code" / "train.py").write_text("")
    for name in NAMES:
        tool(tmp_path / "bin" / name)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in list(os.environ):
        if name.startswith(("CONDA", "MAMBA", "UV_", "VIRTUAL_ENV", "PDM", "SLURM")):
            monkeypatch.delenv(name)
    environments._asked.cache_clear()
    yield folder
    for name in set(NAMES) - {"poetry", "hatch", "pipenv", "pdm"}:
        assert calls(tmp_path / "bin" / name) == [], name


def made(folder: Path, torch: str | None = "2.13.0") -> Path:
    """An environment; returns its Python."""
    return answering(folder / "bin" / "python", torch=torch)


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("uv run python train.py --lr 1", ("--lr", "1")),
        ("uv run train.py --lr 1", ("--lr", "1")),
        ("uv run --no-sync --extra gpu -- train.py", ()),
        ("uv --quiet run --group train python train.py", ()),
        ("A=1 nice uv run --active env B=2 taskset -c 0 python train.py", ()),
        ("pdm run python train.py", ()),
        ("pdm run -s train.py x", ("x",)),
    ],
)
def test_an_environment_in_the_project(project: Path, line: str, arguments: tuple[str]) -> None:
    python = made(project / ".venv")
    (project / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    before = sorted(project.rglob("*"))
    command = parse(line)
    assert (command.python, command.kind, command.name) == (str(python), "script", "train.py")
    assert command.target().args == arguments
    assert command.line() == line
    assert command.environment()["VIRTUAL_ENV"] == str(project / ".venv")
    assert command.environment()["PATH"].startswith(f"{python.parent}:")
    assert "run by the Python of " in command.interpreter.note
    assert sorted(project.rglob("*")) == before


def test_uv_runs_modules_and_console_scripts(project: Path) -> None:
    python = made(project / ".venv")
    command = parse("uv run -m package.train --lr 1")
    assert (command.kind, command.name, command.target().args) == (
        "module", "package.train", ("--lr", "1"),
    )  # fmt: skip
    program(project / ".venv" / "bin" / "fit", f"#!{python}\n")
    command = parse("uv run fit --lr 1")
    assert (command.python, command.name) == (str(python), str(project / ".venv" / "bin" / "fit"))


def test_uv_from_a_folder_of_the_project_and_of_a_workspace(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = made(project / ".venv")
    (project / "pyproject.toml").write_text("[project]\nname='x'\n")
    monkeypatch.chdir(project / "code")
    assert parse("uv run python train.py").python == str(python)
    (project / "code" / "pyproject.toml").write_text("[project]\nname='y'\n")
    assert "there is no environment in" in refused("uv run python train.py")
    (project / "pyproject.toml").write_text("[tool.uv.workspace]\nmembers = ['c*']\n")
    assert parse("uv run python train.py").python == str(python)
    other = made(project / "other")
    monkeypatch.setenv("UV_PROJECT_ENVIRONMENT", "other")
    assert parse("uv run python train.py").python == str(other)
    assert parse(f"VIRTUAL_ENV={project / '.venv'} uv run --active train.py").python == str(python)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("uv run --with rich train.py", "uv run --with makes an environment for this call only"),
        ("uv run --isolated train.py", "uv run --isolated makes an environment"),
        ("uv run --directory x train.py", "uv run --directory x changes the working directory"),
        ("uv run own.py", "lists its own dependencies (# /// script)"),
        ("uv run -p 3.13 train.py", "has Python 3.12.1, and uv may replace it"),
        ("uv run python nowhere.py", "'nowhere.py': there is no such file"),
        ("uv run", "no program is named"),
        ("uv sync", "'uv' runs a training command by `uv run …`"),
        ("uv run nothing", "program 'nothing': there is no such program"),
        ("uvx fit", "'uvx' installs the program into an environment for this call only"),
    ],
)
def test_what_uv_would_make_cannot_be_planned(project: Path, line: str, says: str) -> None:
    made(project / ".venv")
    (project / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\nversion_info = 3.12.1\n")
    (project / "own.py").write_text("# /// script\n# dependencies = ['torch']\n# ///\n")
    assert says in refused(line)
    assert parse("uv run -p 3.12 train.py").python == str(project / ".venv" / "bin" / "python")


def test_an_environment_that_is_missing_or_has_no_torch(project: Path, tmp_path: Path) -> None:
    """trainfit's own Python does not take the place of one that is named."""
    says = refused("uv run python train.py")
    assert f"there is no environment in '{project / '.venv'}' yet" in says and "uv sync" in says
    python = made(project / ".venv", torch=None)
    assert f"the Python of uv run ({python}, Python 3.12.1) has no torch" in refused(
        "uv run python train.py"
    )
    (tmp_path / "bin" / "uv").unlink()
    assert "program 'uv': there is no such program; install it" in refused("uv run train.py")


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("poetry run python train.py", "env info --path --no-ansi"),
        ("hatch run python train.py", "env find"),
        ("hatch -e gpu run python train.py", "env find gpu"),
        ("hatch run gpu:python train.py", "env find gpu"),
        ("pipenv run python train.py", "--venv"),
        ("pdm run --venv gpu python train.py", "venv --path gpu"),
    ],
)
def test_managers_that_keep_environments_elsewhere_are_asked_once(
    project: Path, tmp_path: Path, line: str, asked: str
) -> None:
    name = line.split()[0]
    assert f"{name} names no environment for '{project}'" in refused(line)
    environments._asked.cache_clear()
    python = made(tmp_path / "elsewhere")
    tool(tmp_path / "bin" / name, str(tmp_path / "elsewhere"))
    for _ in range(2):
        command = parse(line)
    assert (command.python, command.line()) == (str(python), line)
    assert calls(tmp_path / "bin" / name) == [asked, asked]


@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("pdm run fit", "pyproject.toml", "[tool.pdm.scripts]\nfit = 'python train.py'\n"),
        ("hatch run x:fit", "hatch.toml", "[envs.default.scripts]\nfit = 'python train.py'\n"),
        ("pixi run fit", "pixi.toml", "[tasks]\nfit = { cmd = 'python train.py' }\n"),
        ("pipenv run fit", "Pipfile", "[scripts]\nfit = 'python train.py'\n"),
    ],
)
def test_names_for_commands_are_said(project: Path, line: str, file: str, text: str) -> None:
    (project / file).write_text(text)
    says = refused(line)
    assert f"'fit' is a name for a command in {file}" in says and "python train.py" in says


def test_pdm_remembers_its_interpreter(project: Path, tmp_path: Path) -> None:
    python = made(tmp_path / "elsewhere")
    (project / ".pdm-python").write_text(f"{python}\n")
    assert parse("pdm run python train.py").python == str(python)


def test_pixi(project: Path) -> None:
    assert "pixi run: no pixi.toml here or above" in refused("pixi run python train.py")
    (project / "pixi.toml").write_text("[workspace]\n")
    python = made(project / ".pixi" / "envs" / "default")
    other = made(project / ".pixi" / "envs" / "cuda")
    assert parse("pixi run python train.py").python == str(python)
    command = parse("pixi run --frozen -e cuda python train.py")
    assert command.python == str(other)
    assert command.environment()["CONDA_PREFIX"] == str(project / ".pixi" / "envs" / "cuda")


@pytest.mark.parametrize("name", ["conda", "mamba", "micromamba"])
def test_conda_and_its_relatives(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    monkeypatch.setenv("CONDA_EXE", str(root / "bin" / "conda"))
    monkeypatch.setenv("MAMBA_ROOT_PREFIX", str(root))
    python, base = made(root / "envs" / "rl"), made(root)
    (root / "envs" / "rl" / "conda-meta").mkdir()
    state = '{"env_vars": {"MUJOCO_GL": "egl"}}'
    (root / "envs" / "rl" / "conda-meta" / "state").write_text(state)
    line = f"{name} run -n rl python train.py --lr 1"
    command = parse(line)
    assert (command.python, command.line()) == (str(python), line)
    environment = command.environment()
    assert (environment["CONDA_DEFAULT_ENV"], environment["MUJOCO_GL"]) == ("rl", "egl")
    assert parse(f"{name} run --name=base python train.py").python == str(base)
    other = made(tmp_path / "other")
    assert parse(f"{name} run -p {tmp_path / 'other'} python train.py").python == str(other)
    missing = refused(f"{name} run -n none python train.py")
    assert f"{name} run -n none: no environment of this name" in missing and str(root) in missing
    assert "--cwd x changes the working directory" in refused(
        f"{name} run --cwd x -n rl python train.py"
    )


def test_conda_environments_in_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, known = made(tmp_path / "far" / "rl"), made(tmp_path / "known" / "vl")
    (tmp_path / "home" / ".conda").mkdir(parents=True)
    (tmp_path / "home" / ".condarc").write_text(f"envs_dirs:\n  - {tmp_path / 'far'}\n")
    listed = tmp_path / "home" / ".conda" / "environments.txt"
    listed.write_text(f"{tmp_path / 'known' / 'vl'}\n")
    line = "conda run --no-capture-output -n {} python train.py"
    assert parse(line.format("rl")).python == str(python)
    assert parse(line.format("vl")).python == str(known)
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "known" / "vl"))
    assert parse("conda run python train.py").python == str(known)
