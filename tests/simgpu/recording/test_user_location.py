"""Which frames are the user's, and which belong to libraries."""

from __future__ import annotations

import importlib
import json
import os
import sys
import weakref
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from trainfit.loader.measure import processes
from trainfit.scripts import execute
from trainfit.simgpu.device import user_location as location


def is_library(*files: Path | str, script: Path | str = "", cwd: Path, path: Path) -> list[bool]:
    """As in a process that was started in ``cwd`` with ``path`` on its path."""

    def asked() -> list[bool]:
        os.chdir(cwd)
        sys.path.append(str(path))
        importlib.reload(location)  # it looks at the folder when it is imported
        if script:
            location.claim(Path(script).parent)
            execute._claim_entry_point(Path(script))
        return [location.is_library(str(each)) for each in files]

    ended = processes.call(asked, 60.0)
    assert ended.value is not None, ended
    return ended.value


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder of installed packages: one is editable (project/lib), one has a console script."""
    folder = tmp_path / "env" / "site-packages"
    editable = folder / "lib-1.0.dist-info"
    editable.mkdir(parents=True)
    (editable / "METADATA").write_text("Metadata-Version: 2.1\nName: lib\nVersion: 1.0\n")
    url = (tmp_path / "project of lib").as_uri()
    (editable / "direct_url.json").write_text(
        json.dumps({"url": url, "dir_info": {"editable": True}})
    )
    tool = folder / "tool-1.0.dist-info"
    tool.mkdir()
    (tool / "METADATA").write_text("Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n")
    (tool / "entry_points.txt").write_text("[console_scripts]\nmytool = mytool.cli:main\n")
    (folder / "mytool").mkdir()
    (folder / "mytool" / "__init__.py").touch()
    damaged = folder / "damaged-1.0.dist-info"
    damaged.mkdir()
    (damaged / "METADATA").write_text("Metadata-Version: 2.1\nName: damaged\nVersion: 1.0\n")
    (damaged / "direct_url.json").write_text("{")
    for name in ("project of lib/lib", "project of lib/scripts", "work"):
        (tmp_path / name).mkdir(parents=True)
    return folder


def test_an_editable_install_is_a_library_of_other_projects(
    tmp_path: Path, installed: Path
) -> None:
    module = tmp_path / "project of lib" / "lib" / "net.py"
    script = tmp_path / "work" / "train.py"
    other = tmp_path / "work" / "models" / "net.py"
    found = is_library(module, script, other, script=script, cwd=tmp_path, path=installed)
    assert found == [True, False, False]


@pytest.mark.parametrize("where", ["the script", "the working directory"])
def test_the_users_own_project_is_his_although_it_is_installed(
    where: str, tmp_path: Path, installed: Path
) -> None:
    project = tmp_path / "project of lib"
    inside = where == "the script"
    script = (project / "scripts" if inside else tmp_path / "work") / "train.py"
    cwd = tmp_path / "work" if inside else project
    module = project / "lib" / "net.py"
    assert is_library(module, script=script, cwd=cwd, path=installed) == [False]


def test_what_a_console_script_runs_is_the_users(tmp_path: Path, installed: Path) -> None:
    own, other = installed / "mytool" / "train.py", installed / "other" / "train.py"
    script = tmp_path / "env" / "bin" / "mytool"
    found = is_library(own, other, script=script, cwd=tmp_path, path=installed)
    assert found == [False, True]
    plain = is_library(own, script=tmp_path / "work" / "train.py", cwd=tmp_path, path=installed)
    assert plain == [True]


def test_debians_packages_are_libraries(tmp_path: Path, installed: Path) -> None:
    files = ("/usr/lib/python3/dist-packages/torch/nn/linear.py", "<string>", "train.py")
    assert is_library(*files, cwd=tmp_path, path=installed) == [True, True, False]


class Held:
    """Something that a variable holds."""


@pytest.mark.skipif(sys.gettrace() is not None, reason="what is traced keeps its variables")
def test_a_look_at_variables_holds_nothing() -> None:
    def script() -> tuple[bool, Any]:
        value: Any = Held()
        seen = weakref.ref(value)
        read = location.locals_of(sys._getframe())["value"] is value
        value = None
        return read, seen()

    assert script() == (True, None)


def test_a_look_leaves_what_a_script_asked_for() -> None:
    def script() -> dict[str, Any]:
        value = 1
        own = locals()
        assert location.locals_of(sys._getframe())["value"] == value
        return own

    assert script()["value"] == 1


def test_a_function_that_is_profiled_keeps_its_variables() -> None:
    """It gets them back from the dictionary that the profiler's function was given."""

    def look(frame: FrameType, event: str, given: Any) -> None:
        if frame.f_code is profiled.__code__:
            seen.append(location.locals_of(frame).get("value"))

    def profiled() -> int:
        value = 7
        len("")
        return value

    seen: list[Any] = []
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        found = profiled()
    finally:
        sys.setprofile(before)
    assert found == 7 and 7 in seen


def test_a_look_at_the_files_imports_nothing_lazy(tmp_path: Path) -> None:
    """SpeechBrain's modules of optional packages fail when an attribute is asked of them."""
    own = tmp_path / "own.py"

    class Lazy(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise ImportError(f"optional package, asked for {name}")

    lazy, eager = Lazy("lazy_part"), ModuleType("eager_part")
    eager.__file__ = str(own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "lazy_part", lazy)
        patch.setitem(sys.modules, "no_module", object())  # type: ignore[misc]
        patch.setitem(sys.modules, "eager_part", eager)
        assert os.path.realpath(own) in location.files_of_user()
