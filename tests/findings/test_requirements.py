"""Versions that a repository asks for, and failures at a package that it excludes."""

from __future__ import annotations

import sys
import traceback
from importlib.metadata import version
from pathlib import Path

import pytest

from trainfit.findings.environment.requirements import asked_for, meets, unmet
from trainfit.findings.failure import of_exception
from trainfit.results.findings import Finding

RICH = version("rich")


@pytest.mark.parametrize(
    ("installed", "asked", "is_met"),
    [
        ("0.29.1", "==0.29.1", True),
        ("1.4.0", "==0.29.1", False),
        ("1.4.0+cpu", "==1.4", True),
        ("1.4.2", "==1.4.*", True),
        ("1.5", "==1.4.*", False),
        ("1.4.0rc1", "<1.4", False),
        ("2.4.6", ">=1.20,<2", False),
        ("2.4.6", ">=1.20", True),
        ("1.9", "~=1.4", True),
        ("1.9", "~=1.4.2", False),
        ("2.0", "!=2", False),
        ("0.10", ">=0.9", True),
        ("2.0", "==a.b", True),
    ],
)
def test_versions_are_compared_as_numbers(installed: str, asked: str, is_met: bool) -> None:
    assert meets(installed, asked) is is_met


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("requirements.txt", "# pinned\nnumpy\nrich[jupyter] == 0.9.1  # old\n"),
        ("requirements-dev.txt", "rich==0.9.1; python_version > '3.6'\n"),
        ("pyproject.toml", '[project]\ndependencies = ["numpy", "rich==0.9.1"]\n'),
        ("pyproject.toml", '[tool.poetry.dependencies]\nrich = {version = "0.9.1"}\n'),
        ("setup.py", "setup(name='a', install_requires=['numpy', 'rich==0.9.1'])\n"),
        ("environment.yaml", "dependencies:\n  - python=3.8\n  - pip:\n    - rich==0.9.1\n"),
        ("environment.yml", "dependencies:\n  - conda-forge::rich=0.9.1=py38_0\n"),
        ("conda_env.yaml", "dependencies:\n  - rich=0.9.1\n"),
        ("README.md", "# A paper\n    pip install numpy rich==0.9.1 six\n"),
    ],
)
def test_where_people_name_versions(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    inner = tmp_path / "tools"
    inner.mkdir()
    for folder in (tmp_path, inner):
        found = unmet(["numpy", "rich"], folder)
        assert found is not None and (found.package, found.installed) == ("rich", RICH)
        assert found.version.startswith("==0.9.1") and found.file.endswith(name)


def test_nothing_is_said_of_versions_that_are_met_or_of_another_repository(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(f"rich>=1\nnumpy=={version('numpy')}\n")
    assert unmet(["rich", "numpy", "not_installed"], tmp_path) is None
    inner = tmp_path / "own"
    inner.mkdir()
    (inner / "pyproject.toml").write_text("[tool.poetry.dependencies]\nrich = '^1.0'\n")
    (tmp_path / "requirements.txt").write_text("torch==0.4\n")
    assert unmet(["torch"], inner) is None
    found = unmet(["rich"], inner)
    assert found is not None and found.version == ">=1.0,<2"


def fault_of(folder: Path, code: str) -> Finding | None:
    script = folder / "train.py"
    script.write_text(code)
    try:
        exec(compile(code, str(script), "exec"), {"__name__": "script"})
    except Exception:
        return of_exception(traceback.format_exc())
    raise AssertionError("it does not fail")


@pytest.mark.parametrize(
    "code",
    [
        "import rich.table as t\nt.Table(no_such=1)\n",
        "import rich\nrich.no_such\n",
        "from rich.table import Table\nTable().add_column(no_such=1)\n",
        "from rich import no_such\n",
        "import rich.no_such\n",
    ],
)
def test_a_package_that_the_repository_excludes_is_named(tmp_path: Path, code: str) -> None:
    (tmp_path / "requirements.txt").write_text("rich==0.9.1\n")
    fault = fault_of(tmp_path, code)
    assert fault is not None and fault.kind == "outdated"
    assert f"requirements.txt asks for rich==0.9.1, and {RICH} is installed" in fault.title
    assert "pip install 'rich==0.9.1'" in fault.fix.action


def asking(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, *wants: str) -> None:
    """An installed package of that name, whose code is imported, and what it asks for."""
    site = folder / "site-packages"
    (site / "asking").mkdir(parents=True)
    (site / "asking" / "__init__.py").write_text(code)
    told = site / "asking-1.5.dist-info" / "METADATA"
    told.parent.mkdir()
    lines = ("Metadata-Version: 2.1", "Name: asking", "Version: 1.5")
    told.write_text("\n".join((*lines, *(f"Requires-Dist: {each}" for each in wants), "")))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "asking", raising=False)


def test_a_package_that_an_installed_one_excludes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wants = ("rich>=1; extra == 'all'", "rich<3,>=0.5")
    asking(tmp_path, monkeypatch, "from rich import no_such\n", *wants)
    fault = fault_of(tmp_path, "import asking\n")
    assert fault is not None and fault.kind == "outdated"
    assert f"asking 1.5 asks for rich<3,>=0.5, and {RICH} is installed" in fault.title
    assert "pip check" in fault.fix.action and "change the line" not in fault.fix.action


def test_a_package_that_an_installed_one_asks_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking(tmp_path, monkeypatch, "import no_such_package\n", "no_such_package")
    fault = fault_of(tmp_path, "import asking\n")
    assert fault is not None and fault.kind == "package_missing"
    assert fault.fix.action == "pip install no_such_package (asking 1.5 names it)"


@pytest.mark.parametrize(
    "code",
    [
        "import rich\ndef call(a): pass\ncall(rich, b=2)\n",  # the script's own function
        "import rich\nclass A: pass\nrich.print(A().no_such)\n",
        "import rich\nrich.print(None.no_such)\n",
        "import rich\nrich.print([][1])\n",
    ],
)
def test_the_scripts_own_mistakes_are_not_laid_to_it(tmp_path: Path, code: str) -> None:
    (tmp_path / "requirements.txt").write_text("rich==0.9.1\n")
    fault = fault_of(tmp_path, code)
    assert fault is None or "rich==0.9.1" not in fault.title


def test_a_version_that_is_taken_for_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trainfit.findings.environment.outdated.installed_version", lambda module: "0.20.1"
    )
    fault = fault_of(
        tmp_path,
        "import rich\nrich.__version__ = '0.20.1'\n"
        "if float(rich.__version__[:3]) < 0.7:\n    from rich import _no_such\n",
    )
    assert fault is not None
    assert fault.title == "`float(rich.__version__[:3]) < 0.7` compares 0.2, and rich is 0.20.1"


@pytest.mark.parametrize(
    ("line", "is_named"),
    [
        ("    pip install rich", True),
        ("$ python3 -m pip install -U numpy 'rich' && python train.py", True),
        ("- `pip install six rich`", True),
        ("A rich page: pip install six, then rich results follow", False),
        ("pip install six  # rich is not needed", False),
        ("pip install -r requirements.txt", False),
    ],
)
def test_a_page_that_names_no_version(tmp_path: Path, line: str, is_named: bool) -> None:
    (tmp_path / "README.md").write_text(f"# A paper\n{line}\n")
    found = asked_for("rich", tmp_path)
    assert (found is not None and found.version == "") is is_named
