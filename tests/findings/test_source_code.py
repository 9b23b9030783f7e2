"""The source of files and functions as syntax: what is found, and what cannot be read."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from trainfit.findings.source_code import (
    file_syntax,
    from_here,
    function_syntax,
    names_in,
    parsed,
    short_file,
)

_MODULE = """\
import functools


def step(x):
    total = x + 1
    return total


class Model:
    @functools.cache
    def step(self, y):
        return y
"""


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    path = tmp_path / "module_of_steps.py"
    path.write_text(_MODULE)
    spec = importlib.util.spec_from_file_location("module_of_steps", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_a_function_is_found_by_its_line_and_has_the_lines_of_its_file(module: ModuleType) -> None:
    function = function_syntax(module.step.__code__)
    method = function_syntax(module.Model.step.__wrapped__.__code__)
    assert isinstance(function, ast.FunctionDef) and isinstance(method, ast.FunctionDef)
    assert (function.body[0].lineno, method.args.args[1].arg) == (5, "y")


def test_a_file_is_read_as_it_is_now(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("x = 1\n")
    before = file_syntax(str(path))
    path.write_text("x = 1\ny = x\n")
    after = file_syntax(str(path))
    assert before is not None and after is not None
    assert (len(before.body), len(after.body)) == (1, 2)


def test_what_cannot_be_read_or_parsed_has_no_syntax(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("for x in:\n")
    space: dict[str, object] = {}
    exec("f = lambda: 1\ndef g(): pass\n", space)
    assert file_syntax(str(path)) is None and file_syntax(str(tmp_path / "none.py")) is None
    assert parsed("x = '\0'") is None
    for made in space["f"], space["g"]:
        assert function_syntax(made.__code__) is None  # type: ignore[attr-defined]


def test_names_are_told_apart_by_what_is_done_with_them() -> None:
    line = ast.parse("a, b[i] = f(a, c)")
    assert sorted(names_in(line)) == ["a", "a", "b", "c", "f", "i"]
    assert names_in(line, ast.Store) == ["a"]
    assert sorted(names_in(line, ast.Load)) == ["a", "b", "c", "f", "i"]


def test_a_file_is_named_from_the_folder_that_this_process_runs_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inside, outside = str(tmp_path / "models" / "net.py"), str(tmp_path.parent / "net.py")
    assert from_here(inside) == short_file(inside) == "models/net.py"
    assert from_here(outside) is None and short_file(outside) == "net.py"
    assert from_here("train.py") == "train.py" and short_file("") == ""
