"""The first changes of CONTRIBUTING.md apply to the package as it is, and their tests pass."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


@dataclass(frozen=True)
class Recipe:
    """``hunks`` are by file: lines that are there and what stands in their place."""

    title: str
    hunks: tuple[tuple[str, str, str], ...]
    tests: str

    @property
    def new_tests(self) -> list[str]:
        names = re.compile(r"^def (test_\w+)", re.M)
        return [
            name
            for _, old, new in self.hunks
            for name in names.findall(new)
            if name not in names.findall(old)
        ]


def recipes() -> list[Recipe]:
    """Of the section of first changes."""
    section = TEXT.partition("## Four first changes\n")[2].partition("\n## ")[0]
    found = []
    for part in section.split("\n### ")[1:]:
        diff = part.partition("```diff\n")[2].partition("```")[0]
        tests = re.search(r"^Tests: `([^`]+)`", part, re.M)
        assert tests, part
        found.append(Recipe(part.partition("\n")[0], tuple(hunks(diff)), tests[1]))
    return found


def hunks(diff: str) -> list[tuple[str, str, str]]:
    """File, old and new text of each; "@@" begins another one in the same file."""
    found = []
    for of_file in re.split(r"^\+\+\+ ", diff, flags=re.M)[1:]:
        name, _, rest = of_file.partition("\n")
        for hunk in rest.split("@@\n"):
            lines = hunk.splitlines()
            old = [line[1:] for line in lines if not line.startswith("+")]
            new = [line[1:] for line in lines if not line.startswith("-")]
            found.append((name, "\n".join(old), "\n".join(new)))
    return found


def applied(recipe: Recipe, root: Path) -> None:
    """Raises ``AssertionError`` where a hunk's place is not there, or there twice."""
    for name, old, new in recipe.hunks:
        file = root / name
        text = file.read_text("utf-8")
        there = [m.start() for m in re.finditer(rf"^{re.escape(old)}$", text, re.M)]
        assert old and len(there) == 1, (
            f"{recipe.title}: {name}: {old!r} is there {len(there)} times"
        )
        at = there[0]
        file.write_text(text[:at] + new + text[at + len(old) :], "utf-8")


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and its tests with all changes."""
    root = tmp_path_factory.mktemp("changed")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for recipe in recipes():
        applied(recipe, root)
    return root


def test_there_are_four_and_each_has_code_and_a_test() -> None:
    titles = [recipe.title for recipe in recipes()]
    assert titles == [
        "Add a watch rule", "Add a GPU", "Add an operator's workspace", "Add a fix",
    ]  # fmt: skip
    for recipe in recipes():
        files = {name for name, _, _ in recipe.hunks}
        assert {name.partition("/")[0] for name in files} == {"src", "tests"}, recipe.title
        assert shlex.split(recipe.tests)[0] in files, recipe.title


def test_every_change_has_its_place_and_is_python(changed: Path) -> None:
    for recipe in recipes():
        for name, _, _ in recipe.hunks:
            ast.parse((changed / name).read_text("utf-8"), name)


def test_files_that_the_recipes_name_are_there() -> None:
    section = TEXT.partition("## Four first changes\n")[2].partition("\n## ")[0]
    plain = re.sub(r"```diff\n.*?```", "", section, flags=re.S)
    for name in re.findall(r"`([\w/]+\.(?:py|json|md))", plain):
        assert (ROOT / name).exists() or (ROOT / "src" / "trainfit" / name).exists(), name


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: recipe.title)
def test_its_tests_pass(recipe: Recipe, changed: Path) -> None:
    path = os.pathsep.join(map(str, (changed / "src", changed / "tests")))
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA"]
    done = subprocess.run(
        [*words, *shlex.split(recipe.tests)], cwd=changed, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    for name in recipe.new_tests:
        assert re.search(rf"PASSED .*{name}", done.stdout), name
