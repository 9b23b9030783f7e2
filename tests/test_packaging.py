"""The wheel and the sdist: what is in them, and that the installed wheel runs by itself.

`make package` names its folder in ``TRAINFIT_DIST``; else both are built here, from a copy.
"""

from __future__ import annotations

import email
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import trainfit

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "trainfit"
#: What no archive holds: git's own, environments, caches and what was built.
LEFT_OUT = shutil.ignore_patterns(
    *(".git", ".venv*", "data", "build", "dist", "htmlcov", "__pycache__", "*.py[cod]"),
    *("*.egg-info", "*.trainfit", ".coverage*", ".hypothesis", "*_cache"),
)
SCRIPT = """
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
"""


def run(*words: str | Path, cwd: Path, codes: tuple[int, ...] = (0,)) -> str:
    """Standard output of a command that must end well, without this process's Python paths."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTORCH_"))}
    done = subprocess.run(words, cwd=cwd, env=variables, capture_output=True, text=True)
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


def files_below(folder: Path) -> set[str]:
    """Relative paths of a source folder's files, without caches."""
    found = set()
    for parent, folders, files in os.walk(folder):
        dropped = LEFT_OUT(parent, folders + files)
        folders[:] = [name for name in folders if name not in dropped]
        found |= {str(Path(parent, name).relative_to(folder)) for name in {*files} - dropped}
    return found


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("TRAINFIT_DIST"):
        return ROOT / given
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, folder / "source", ignore=LEFT_OUT)
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist")
    run(*build, folder / "source", cwd=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def in_wheel(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    name = f"trainfit-{trainfit.__version__}.dist-info/METADATA"
    return email.message_from_bytes(zipfile.ZipFile(wheel).read(name))


@pytest.fixture(scope="module")
def installed(
    wheel: Path, metadata: Message, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Programs of a new environment that holds the wheel and what it requires, and a folder."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    programs = folder / "venv" / "bin"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    pip = (*pip, "--python", str(programs / "python"))
    run(*pip, "install", "--no-index", "--no-deps", wheel, cwd=folder)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    lend_required(metadata.get_all("Requires-Dist", []), packages)
    (folder / "work").mkdir()
    (folder / "work" / "train.py").write_text(SCRIPT)
    return programs, folder / "work"


def lend_required(requirements: list[str], packages: Path) -> None:
    """Link what the wheel requires, and nothing else, from this environment.

    PyTorch is too large to install once more. A package that trainfit imports and does not
    declare is missing in the new environment, as it would be for a user.
    """
    waiting = [Requirement(text) for text in requirements]
    done = set()
    while waiting:
        wanted = waiting.pop()
        if wanted.name in done or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        done.add(wanted.name)
        distribution = importlib.metadata.distribution(wanted.name)
        waiting += [Requirement(text) for text in distribution.requires or ()]
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))))


def test_the_wheel_holds_the_package_and_nothing_else(in_wheel: set[str]) -> None:
    expected = {f"trainfit/{name}" for name in files_below(PACKAGE)}
    assert {"trainfit/py.typed", "trainfit/hardware/probes/torch_devices.py"} <= expected
    assert {name for name in in_wheel if not name.startswith("trainfit-")} == expected
    assert f"trainfit-{trainfit.__version__}.dist-info/licenses/LICENSE" in in_wheel


def test_the_wheel_has_the_version_of_the_code_and_a_licence(metadata: Message) -> None:
    assert metadata["Version"] == trainfit.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "# trainfit" in str(metadata.get_payload())


def test_the_sdist_holds_what_tests_docs_and_builds_need(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    base = f"trainfit-{trainfit.__version__}/"
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(base) for name in archive.getnames()}
    for folder in ("src/trainfit", "tests", "docs", "bench", "examples", "requirements"):
        missing = {f"{folder}/{name}" for name in files_below(ROOT / folder)} - names
        assert not missing
    top = {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "pyproject.toml", "MANIFEST.in"}
    # tests/test_ci_definition.py reads these.
    top |= {".ci/run", ".pre-commit-config.yaml", ".github/workflows/ci.yml"}
    assert top <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(".venv")]


def test_the_installed_command_says_its_version(installed: tuple[Path, Path]) -> None:
    programs, folder = installed
    said = run(programs / "trainfit", "--version", cwd=folder)
    assert said == f"trainfit {trainfit.__version__}\n"
    asked = "import trainfit; print(trainfit.__file__)"
    assert run(programs / "python", "-c", asked, cwd=folder).startswith(str(folder.parent / "venv"))


def test_the_installed_command_knows_gpus(installed: tuple[Path, Path]) -> None:
    programs, folder = installed
    assert "RTX 4090" in run(programs / "trainfit", "gpus", "RTX 4090", cwd=folder)


def test_the_installed_command_simulates_a_script(installed: tuple[Path, Path]) -> None:
    programs, folder = installed
    words = ("simulate", "--gpu", "T4", "--json", "train.py")
    assert json.loads(run(programs / "trainfit", *words, cwd=folder))


def test_the_installed_command_plans_a_script(installed: tuple[Path, Path]) -> None:
    programs, folder = installed
    words = ("plan", "--gpu", "A100 40GB", "--no-loader", "--json", "--", "python", "train.py")
    plan = json.loads(run(programs / "trainfit", *words, cwd=folder))
    held = plan["now"]["by_kind_bytes"]
    # 64 x 64 weights and 64 biases in float32, in blocks of 512 bytes; two moments of each.
    assert held["parameter"] == held["gradient"] == 4 * 64 * 64 + 512
    assert held["optimizer_state"] == 2 * held["parameter"]
    assert plan["now"]["fits"] is True


def test_the_shipped_profiles_are_installed(installed: tuple[Path, Path]) -> None:
    programs, folder = installed
    asked = (
        "from trainfit.hardware.context_memory import shipped_profiles; "
        "print(*shipped_profiles(), sep='\\n')"
    )
    found = run(programs / "python", "-c", asked, cwd=folder).splitlines()
    assert len(found) == len(list((PACKAGE / "hardware" / "profiles").glob("*.json"))) > 0


def test_the_installed_probes_run(installed: tuple[Path, Path]) -> None:
    """The doctor asks the driver in processes of their own, by the paths of packaged scripts."""
    programs, folder = installed
    words = ("doctor", "--json", "--record", folder / "machine.json")
    # Exit code 1 where something is wrong with this machine, as on one without a GPU.
    run(programs / "trainfit", *words, cwd=folder, codes=(0, 1))
    probes = json.loads((folder / "machine.json").read_text())["probes"]
    assert {"cuda_driver", "nvml_gpus"} <= probes.keys()
    assert not [name for name, answer in probes.items() if "fails" in answer]
    assert probes["nvml_gpus"].get("where") != "import", "nvidia-ml-py is not there"
