"""Environment managers before a command (``uv run``, ``conda run``, …): whose Python it has.

The environment is looked up, and never made, synchronized or changed: from the files of uv, pdm,
pixi and conda, and with the question for its path that Poetry, Hatch and Pipenv answer. What is
planned is thus the environment as it is now. Scripts that conda's packages run at activation,
and variables of `.env` files, are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from trainfit.plan.command.tasks import Given
from trainfit.plan.command.tunables import CommandError
from trainfit.plan.command.wrappers import Wrapper, check

#: Seconds in which a manager has said where its environment is.
_LIMIT_S: Final = 60.0
#: Names that uv's ``--python`` has for a version.
_VERSION: Final = re.compile(r"(?:cpython@?|python)?(?P<version>3(?:\.\d+){0,2})")


@dataclasses.dataclass(frozen=True)
class ManagedEnvironment:
    """The folder of a manager's environment, and what the command gets from it.

    ``begins`` is the place of the first word behind the manager's own; ``program`` that word as
    the manager reads it (Hatch's ``test:python`` is ``python``); ``runs`` what it is where no
    program is named: a script or a module.
    """

    folder: Path
    variables: Mapping[str, str]
    begins: int
    program: str
    runs: Literal["program", "script", "module"] = "program"


@dataclasses.dataclass(frozen=True)
class _Call:
    """A manager's call: its name, its options before and behind ``run``, the word that follows,
    and the variables of the command so far."""

    name: str
    given: Given
    program: str
    environment: Mapping[str, str]

    @property
    def shown(self) -> str:
        return f"{self.name} run"

    def ask(self, *words: str) -> str:
        """What the manager prints; empty where it fails."""
        return _asked(self.name, words, self.environment.get("PATH"), os.getcwd())


@dataclasses.dataclass(frozen=True)
class _Manager:
    """How a manager is called, and where its environment is; ``find`` raises
    :class:`CommandError`, or gives a folder that need not exist.

    ``tasks`` are tables of the project's file that give names to commands.
    """

    options: Wrapper
    find: Callable[[_Call], Path]
    make: str
    variable: str = "VIRTUAL_ENV"
    tasks: tuple[str, ...] = ()


def environment_of(
    words: Sequence[str], at: int, environment: Mapping[str, str]
) -> ManagedEnvironment | None:
    """The environment in which a manager at ``words[at]`` runs what follows; ``None`` where no
    manager stands there. ``environment`` has the command's variables so far.

    Raises :class:`CommandError`: not installed, no environment, or nothing that can be planned.
    """
    name = Path(words[at]).name
    manager = _MANAGERS.get(name)
    if manager is None:
        return None
    before, begins = manager.options.read(words, at + 1)
    if words[begins : begins + 1] not in (["run"], ["r"]):
        raise CommandError(
            f"{name!r} runs a training command by `{name} run …`; give that, or `python train.py …`"
        )
    if shutil.which(words[at], path=environment.get("PATH")) is None:
        raise CommandError(
            f"program {words[at]!r}: there is no such program; install it, or begin the command "
            "with the path of its environment's Python"
        )
    behind, begins = manager.options.read(words, begins + 1)
    given = {**before, **behind}
    check(f"{name} run", manager.options, given)
    if begins >= len(words):
        raise CommandError(f"{name} run: no program is named; add `python train.py`")
    call = _Call(name, given, words[begins], environment)
    _check_task(call, manager)
    folder = manager.find(call)
    if not (folder / "bin" / "python").exists():
        raise CommandError(
            f"{call.shown}: there is no environment in {str(folder)!r} yet, and trainfit makes "
            f"none; make it with `{manager.make}`"
        )
    path = [str(folder / "bin"), *filter(None, [environment.get("PATH", "")])]
    variables = {manager.variable: str(folder), "PATH": os.pathsep.join(path)}
    program, runs = words[begins], _runs(call)
    if name == "hatch":
        program = program.rpartition(":")[2]
    return ManagedEnvironment(folder, variables | _set(call, folder), begins, program, runs)


def _runs(call: _Call) -> Literal["program", "script", "module"]:
    """What the first word is where the manager starts Python by itself."""
    if call.name == "uv" and call.given.keys() & {"m", "module"}:
        return "module"
    names_script = call.program.endswith(".py") and Path(call.program).is_file()
    if call.name in ("uv", "pdm") and (names_script or call.given.keys() & {"s", "script"}):
        return "script"
    return "program"


def _set(call: _Call, folder: Path) -> dict[str, str]:
    """Variables that the call sets, and those that are set for an environment of conda's."""
    found = {}
    if call.name in _CONDA:
        found = {"CONDA_DEFAULT_ENV": call.given.get("name") or folder.name}
        try:
            state = json.loads((folder / "conda-meta" / "state").read_text())
            found |= {name: str(value) for name, value in state["env_vars"].items()}
        except (OSError, ValueError, KeyError, AttributeError):
            pass
    name, equals, value = call.given.get("env", "").partition("=")
    return found | ({name: value} if equals else {})


# -- the projects' files -----------------------------------------------------------------------


def _upwards() -> Iterator[Path]:
    here = Path.cwd()
    return iter((here, *here.parents))


def _document(path: Path) -> dict[str, Any]:
    """A TOML file; empty where there is none that can be read."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    for part in name.split("."):
        found = document.get(part, {})
        document = found if isinstance(found, dict) else {}
    return document


def _check_task(call: _Call, manager: _Manager) -> None:
    """Raise :class:`CommandError` where the word is the name of a command of the project's."""
    if call.given.keys() & {"x", "executable"}:
        return
    word = call.program.rpartition(":")[2]
    for folder in _upwards():
        for table in manager.tasks:
            file, _, name = table.partition(" ")
            task = _table(_document(folder / file), name).get(word)
            if task is not None:
                text = task if isinstance(task, str) else json.dumps(task, default=str)
                raise CommandError(
                    f"{call.shown}: {word!r} is a name for a command in {file} "
                    f"({' '.join(text.split())[:120]}); give that command itself, behind "
                    f"`{call.shown}`"
                )


def _project(call: _Call, option: str, *marks: str) -> Path | None:
    """The project's folder: as the option says, or the nearest with one of the files ``marks``."""
    if call.given.get(option):
        named = Path(call.given[option]).absolute()
        return named.parent if named.is_file() else named
    return next((f for f in _upwards() if any((f / mark).is_file() for mark in marks)), None)


def _active(call: _Call) -> str:
    return call.environment.get("VIRTUAL_ENV", "")


def _uv(call: _Call) -> Path:
    for option in ("with", "with-editable", "with-requirements", "isolated"):
        if option in call.given:
            raise CommandError(
                f"uv run --{option} makes an environment for this call only, into which trainfit "
                "cannot look; add the packages to the project (uv add …), and leave it out"
            )
    if call.program.endswith(".py") and _has_metadata(Path(call.program)):
        raise CommandError(
            f"uv run {call.program}: the script lists its own dependencies (# /// script), and uv "
            "makes an environment for it; give its Python: "
            f"$(uv python find --script {call.program}) {call.program} …"
        )
    root = None if "no-project" in call.given else _uv_root(call)
    if "active" in call.given and _active(call):
        folder = Path(_active(call))
    elif root is not None:
        folder = root / call.environment.get("UV_PROJECT_ENVIRONMENT", ".venv")
    else:
        near = (upward / ".venv" for upward in _upwards() if (upward / ".venv").is_dir())
        named = _active(call) or call.environment.get("CONDA_PREFIX", "")
        folder = Path(named) if named else next(near, Path(".venv").absolute())
    _check_version(call, folder)
    return folder


def _uv_root(call: _Call) -> Path | None:
    """The folder of the project, or of the workspace that it is a member of."""
    path = _project(call, "project", "pyproject.toml")
    if path is None:
        return None
    for folder in (path, *path.parents):
        workspace = _table(_document(folder / "pyproject.toml"), "tool.uv.workspace")
        members = (
            file for pattern in workspace.get("members", ()) for file in folder.glob(pattern)
        )
        if workspace and (folder == path or path in members):
            return folder
    return path


def _has_metadata(script: Path) -> bool:
    try:
        return re.search(r"^# /// script\s*$", script.read_text(), re.MULTILINE) is not None
    except (OSError, ValueError):
        return False


def _check_version(call: _Call, folder: Path) -> None:
    """uv re-creates an environment whose Python is not the one that ``--python`` names."""
    wanted = call.given.get("python") or call.environment.get("UV_PYTHON", "")
    config = folder / "pyvenv.cfg"
    if not wanted or not config.is_file():
        return
    match = re.search(r"^version(?:_info)?\s*=\s*(\S+)", config.read_text(), re.MULTILINE)
    named = _VERSION.fullmatch(wanted)
    if match and named and f"{match[1]}.".startswith(f"{named['version']}."):
        return
    has = f"Python {match[1]}" if match else "an unknown Python"
    raise CommandError(
        f"uv run --python {wanted}: the environment {str(folder)!r} has {has}, and uv may replace "
        f"it; make it with `uv sync --python {wanted}`, and leave --python out"
    )


def _pdm(call: _Call) -> Path:
    if "recreate" in call.given or "global" in call.given:
        raise CommandError("pdm run --recreate and --global cannot be planned; leave them out")
    root = _project(call, "project", "pyproject.toml") or Path.cwd()
    if named := call.given.get("venv"):
        return _said(call, call.ask("venv", "--path", named))
    try:
        # bin/python of an environment, whatever that links to.
        return Path((root / ".pdm-python").read_text().strip()).parent.parent
    except OSError:
        return Path(_active(call) or root / ".venv")


def _poetry(call: _Call) -> Path:
    options = [f"--{name}={call.given[name]}" for name in ("project",) if call.given.get(name)]
    return _said(call, call.ask("env", "info", "--path", "--no-ansi", *options))


def _hatch(call: _Call) -> Path:
    if call.program.startswith(("+", "-")):
        raise CommandError(
            "hatch run with +variables and -variables runs several environments; name one: "
            "hatch run ENV:python train.py"
        )
    name = call.program.rpartition(":")[0] or call.given.get("env", "")
    return _said(call, call.ask("env", "find", *filter(None, [name])))


def _pipenv(call: _Call) -> Path:
    return _said(call, call.ask("--venv"))


def _said(call: _Call, answer: str) -> Path:
    lines = [line for line in answer.splitlines() if line.strip().startswith("/")]
    if len(lines) != 1:
        manager = _MANAGERS[call.name]
        raise CommandError(
            f"{call.shown}: {call.name} names no environment for {os.getcwd()!r}; make it with "
            f"`{manager.make}`, or begin the command with the path of its Python"
        )
    return Path(lines[0].strip())


@functools.lru_cache(maxsize=16)
def _asked(name: str, words: tuple[str, ...], path: str | None, folder: str) -> str:
    """What a manager prints of its environment in ``folder``; it is only asked for a path."""
    program = shutil.which(name, path=path)
    try:
        done = subprocess.run(
            [program or name, *words],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout


def _pixi(call: _Call) -> Path:
    root = _project(call, "manifest-path", "pixi.toml", "pyproject.toml")
    if root is None:
        raise CommandError(
            "pixi run: no pixi.toml here or above; change to the project's folder, or name it "
            "with --manifest-path"
        )
    return root / ".pixi" / "envs" / (call.given.get("environment") or "default")


# -- conda and its relatives ---------------------------------------------------------------------

_CONDA: Final = ("conda", "mamba", "micromamba")


def _conda(call: _Call) -> Path:
    if prefix := call.given.get("prefix"):
        return Path(prefix).expanduser().absolute()
    roots = list(_conda_roots(call))
    name = call.given.get("name", "")
    if not name:
        active = call.environment.get("CONDA_PREFIX", "")
        return Path(active) if active or not roots else roots[0]
    if name in ("base", "root") and roots:
        return roots[0]
    if os.sep in name:
        return Path(name).expanduser().absolute()
    places = [folder / name for folder in _conda_folders(call, roots)]
    place = next((each for each in places if (each / "bin" / "python").exists()), None)
    if place is None:
        looked = ", ".join(map(str, dict.fromkeys(each.parent for each in places))) or "no folder"
        raise CommandError(
            f"{call.shown} -n {name}: no environment of this name with a Python (looked in "
            f"{looked}); give its folder, as in -p PATH"
        )
    return place


def _conda_roots(call: _Call) -> Iterator[Path]:
    """Folders of installations, the named one first: each has its own ``envs``."""
    for option in ("root-prefix", "r"):
        if call.given.get(option):
            yield Path(call.given[option]).expanduser().absolute()
    variables = ("MAMBA_ROOT_PREFIX",) if call.name == "micromamba" else ("CONDA_EXE", "MAMBA_EXE")
    for variable in variables:
        if value := call.environment.get(variable):
            yield Path(value) if variable.endswith("PREFIX") else Path(value).parent.parent
    program = shutil.which(call.name, path=call.environment.get("PATH"))
    if program is not None and call.name != "micromamba":
        yield Path(program).resolve().parent.parent
    home = Path(call.environment.get("HOME", "/"))
    if call.name == "micromamba":
        yield from (home / ".local" / "share" / "mamba", home / "micromamba")


def _conda_folders(call: _Call, roots: Sequence[Path]) -> Iterator[Path]:
    """Folders of environments, in conda's order."""
    for variable in ("CONDA_ENVS_DIRS", "CONDA_ENVS_PATH"):
        yield from map(Path, filter(None, call.environment.get(variable, "").split(os.pathsep)))
    home = Path(call.environment.get("HOME", "/"))
    for file in (home / ".condarc", *(root / ".condarc" for root in roots)):
        yield from (Path(each).expanduser() for each in _listed(file, "envs_dirs"))
    yield from (root / "envs" for root in roots)
    yield home / ".conda" / "envs"
    try:  # all that conda has made, wherever they are
        known = (home / ".conda" / "environments.txt").read_text().splitlines()
    except OSError:
        known = []
    yield from (Path(line).parent for line in known if line.strip())


def _listed(file: Path, key: str) -> list[str]:
    """A list of words in a YAML file of conda's, which has one entry a line."""
    try:
        match = re.search(rf"^{key}:\s*\n((?:\s*-\s*.+\n?)+)", file.read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return []
    lines = match[1].splitlines() if match else []
    return [line.strip().removeprefix("-").strip().strip("'\"") for line in lines]


_UV_VALUED: Final = (
    "w=with i=index-url f=find-links P=upgrade-package C=config-setting p=python extra no-extra "
    "group no-group only-group no-editable-package env-file with-editable with-requirements "
    "package python-platform index default-index extra-index-url index-strategy keyring-provider "
    "upgrade-group resolution prerelease prerelease-package fork-strategy exclude-newer "
    "exclude-newer-package no-sources-package reinstall-package link-mode config-settings-package "
    "no-build-isolation-package no-build-package no-binary-package cache-dir refresh-package "
    "color allow-insecure-host directory project config-file"
)
_CONDA_RUN: Final = _Manager(
    Wrapper("n=name p=prefix cwd", moves=("cwd",)),
    _conda,
    "conda create -p PATH python",
    "CONDA_PREFIX",
)
_MANAGERS: Final[Mapping[str, _Manager]] = {
    "uv": _Manager(Wrapper(_UV_VALUED, moves=("directory",)), _uv, "uv sync"),
    "poetry": _Manager(
        Wrapper("C=directory P=project", moves=("directory",)), _poetry, "poetry install"
    ),
    "pdm": _Manager(
        Wrapper("p=project k=skip venv env env-file working-dir", moves=("working-dir",)),
        _pdm,
        "pdm install",
        tasks=("pyproject.toml tool.pdm.scripts",),
    ),
    "hatch": _Manager(
        Wrapper("e=env p=project data-dir cache-dir config"),
        _hatch,
        "hatch env create",
        tasks=("pyproject.toml tool.hatch.envs.default.scripts", "hatch.toml envs.default.scripts"),
    ),
    "pipenv": _Manager(Wrapper("python"), _pipenv, "pipenv install", tasks=("Pipfile scripts",)),
    "pixi": _Manager(
        Wrapper(
            "e=environment p=platform m=manifest-path color concurrent-downloads "
            "concurrent-solves pinning-strategy pypi-keyring-provider auth-file config-file"
        ),
        _pixi,
        "pixi install",
        "CONDA_PREFIX",
        tasks=("pixi.toml tasks", "pyproject.toml tool.pixi.tasks"),
    ),
    "conda": _CONDA_RUN,
    "mamba": _CONDA_RUN,
    "micromamba": dataclasses.replace(
        _CONDA_RUN,
        options=Wrapper(
            "n=name p=prefix r=root-prefix e=env a=attach cwd label rc-file", moves=("cwd",)
        ),
        make="micromamba create -p PATH python",
    ),
}
