"""CI, the pre-commit hooks and the Makefile say the same, and cover what pyproject.toml admits."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from trainfit import __version__

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
MATRIX: dict[str, Any] = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]
#: Steps that are no check of the project but prepare the runner.
PREPARES_THE_RUNNER = {"sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"}


def commands() -> Iterator[str]:
    """The shell commands of all jobs."""
    for job in WORKFLOW["jobs"].values():
        for step in job["steps"]:
            yield from str(step.get("run", "")).splitlines()


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", MAKEFILE, flags=re.MULTILINE))


def recipe(target: str) -> list[str]:
    """The commands of a target, without `$(BIN)/`."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.MULTILINE)
    assert found, target
    return [line.strip().removeprefix("$(BIN)/") for line in found[1].splitlines()]


def pinned(file: str, package: str) -> Version:
    found = re.search(rf"^{package}==(\S+)$", (ROOT / file).read_text(), flags=re.MULTILINE)
    assert found, f"{package} in {file}"
    return Version(found[1])


def torch_bound() -> SpecifierSet:
    (torch,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch")
    return torch.specifier


def test_every_check_is_a_target_of_the_makefile() -> None:
    checks = [command for command in commands() if command not in PREPARES_THE_RUNNER]
    called = {command.split()[1] for command in checks if command.split()[0] == "make"}
    assert all(command.startswith("make ") for command in checks)
    assert called == {"lint", "test", "test-newest", "test-slow", "torch", "docs", "package"}
    assert called <= make_targets()


def test_what_must_pass_before_a_merge_is_in_ci() -> None:
    local = re.findall(r"^make (.+)$", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE)
    targets = {word for words in local for word in words.split() if re.match("[a-z]", word)}
    assert targets >= {"lint", "test"}
    assert {f"make {target}" for target in targets} <= set(commands())


def test_pythons_are_those_that_pyproject_admits() -> None:
    admitted = SpecifierSet(PROJECT["requires-python"])
    prefix = "Programming Language :: Python :: 3."
    named = [c.removeprefix(prefix) for c in PROJECT["classifiers"] if c.startswith(prefix)]
    minors = [int(version.removeprefix("3.")) for version in MATRIX["python"]]
    assert minors == list(range(min(minors), max(minors) + 1))
    assert [str(minor) for minor in minors] == named
    assert all(admitted.contains(f"3.{minor}.0") for minor in minors)
    assert not admitted.contains(f"3.{min(minors) - 1}.99")


def test_pytorches_are_the_oldest_that_pyproject_admits_and_the_newest() -> None:
    oldest, newest = MATRIX["torch"]
    tested = pinned(f"requirements/torch-{oldest}.txt", "torch")
    assert str(torch_bound()) == f">={oldest}"
    assert tested.release[:2] == Version(oldest).release
    lines = (ROOT / f"requirements/torch-{newest}.txt").read_text().splitlines()
    assert "torch" in lines, "the newest is not pinned"


def test_the_newest_pytorch_is_tested_in_its_build_with_cuda() -> None:
    job = WORKFLOW["jobs"]["newest"]
    assert job["env"] == {"PIP_EXTRA_INDEX_URL": ""}, "the CPU's builds would be taken"
    assert "make test-newest" in [step.get("run") for step in job["steps"]]
    script = (ROOT / ".ci/newest-pytorch").read_text()
    assert "--upgrade -r requirements/torch-newest.txt" in script
    assert os.access(ROOT / ".ci/newest-pytorch", os.X_OK)
    (clean,) = (line for line in recipe("clean") if ".venv " in line)
    assert ".venv-newest" in clean
    assert ".venv-newest/" in (ROOT / ".gitignore").read_text()


def test_the_pinned_pytorch_is_tested_and_admitted() -> None:
    (pinned_job,) = MATRIX["include"]
    (install,) = (s for s in WORKFLOW["jobs"]["test"]["steps"] if "torch" in s.get("run", ""))
    assert pinned_job["python"] in MATRIX["python"]
    assert install["if"] == f"matrix.torch != '{pinned_job['torch']}'"
    assert torch_bound().contains(str(pinned("requirements/plan.txt", "torch")))


def test_jobs_take_a_python_of_the_matrix_and_cache_what_pip_downloads() -> None:
    for name, job in WORKFLOW["jobs"].items():
        (setup,) = (s for s in job["steps"] if s.get("uses", "").startswith("actions/setup-python"))
        python = setup["with"]["python-version"]
        assert python in (*MATRIX["python"], "${{ matrix.python }}"), name
        assert setup["with"]["cache"] == "pip"
        assert list(ROOT.glob(setup["with"]["cache-dependency-path"])), name


def test_ci_changes_nothing_in_the_repository() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in WORKFLOW["jobs"].values())
    # PyYAML reads the key `on` as YAML 1.1's true.
    assert {"push", "pull_request", "schedule"} <= set(WORKFLOW[True])
    assert not {"pull_request_target", "release"} & set(WORKFLOW[True])


def test_the_hooks_are_the_linters_of_the_makefile() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"] for hook in repo["hooks"]]
    assert repo["repo"] == "local"
    assert all(entry.startswith(".venv/bin/") for entry in entries)
    # What changes files in place is checked by `make lint`, and by the hook for the files given.
    run = [entry.removeprefix(".venv/bin/").removesuffix(" --fix") for entry in entries]
    lint = [line.removesuffix(" .").removesuffix(" --check") for line in recipe("lint")]
    assert run == lint


@pytest.mark.parametrize("tool", ["ruff", "mypy", "import-linter", "build", "pytest-cov"])
def test_tools_have_one_version_in_the_development_requirements(tool: str) -> None:
    assert pinned("requirements/dev.txt", tool)


def test_the_changelog_has_a_section_for_the_version_and_one_for_what_comes() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    assert releases[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(__version__)} - \d{{4}}-\d\d-\d\d", releases[1])
    for release in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.+)$", release, flags=re.MULTILINE)
        known = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
        assert set(kinds) <= set(known) and len(set(kinds)) == len(kinds)


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("bug.yml", {"version", "command", "result", "happened"}),
        ("wrong-plan.yml", {"version", "command", "script", "predicted", "measured", "gpu"}),
        ("feature.yml", {"problem"}),
    ],
)
def test_issue_forms_ask_for_what_repeating_needs(file: str, wanted: set[str]) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / file).read_text())
    parts = [part for part in form["body"] if part["type"] != "markdown"]
    assert form["name"] and form["description"]
    assert len({part["id"] for part in parts}) == len(parts)
    assert {p["id"] for p in parts if p.get("validations", {}).get("required")} == wanted
