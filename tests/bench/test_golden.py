"""bench/golden.py: what is compared, what is masked, and its store."""

from __future__ import annotations

import importlib
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def golden(bench_scripts: None) -> Any:
    return importlib.import_module("golden")


def test_a_document_is_a_line_for_each_value(golden: Any) -> None:
    text = json.dumps({"a": [1, {"b": None}], "c": {}, "d": "x = y"})
    assert golden.document(text) == [".a[0] = 1", ".a[1].b = null", ".c = {}", '.d = "x = y"']
    assert golden.document("Fits: 1 GiB") == []


def test_what_differs_between_two_runs_is_not_compared(golden: Any) -> None:
    first = ["Fits: 2 GiB", ".seconds = 1.2", "in 3 s", ".steps = 3"]
    stored = golden.masked(first, ["Fits: 2 GiB", ".seconds = 1.3", "in 4 s", ".steps = 3"])
    assert stored == ["Fits: 2 GiB", ".seconds = ~", "~", ".steps = 3"]
    assert golden.changed(stored, ["Fits: 2 GiB", ".seconds = 9", "in 10 s", ".steps = 3"]) == []


def test_how_long_checks_took_is_not_compared_though_two_runs_have_it_alike(golden: Any) -> None:
    stored = golden.masked(["1 bad, 9 good (12.5 ms)"], ["1 bad, 9 good (12.5 ms)"])
    assert stored == ["~"] and golden.changed(stored, ["1 bad, 9 good (13 ms)"]) == []
    assert golden.masked(["a step (12.5 ms)"], ["a step (12.5 ms)"]) == ["a step (12.5 ms)"]


@pytest.mark.parametrize(
    "now",
    [
        ["Fits: 3 GiB", ".seconds = 9", ".steps = 3"],
        ["Fits: 2 GiB", ".wall_s = 9", ".steps = 3"],
        ["Fits: 2 GiB", ".seconds = 9"],
        [],
    ],
    ids=["a figure", "a name", "a line less", "nothing"],
)
def test_a_change_is_seen(golden: Any, now: list[str]) -> None:
    assert golden.changed(["Fits: 2 GiB", ".seconds = ~", ".steps = 3"], now)


def test_another_number_of_lines_is_no_answer_to_compare(golden: Any) -> None:
    assert golden.masked(["a"], ["a", "b"]) == ["~"]


def test_every_case_is_stored_and_has_something_to_compare(golden: Any) -> None:
    stored = json.loads(lzma.decompress(golden.STORE.read_bytes()))["cases"]
    assert set(stored) == {case.name for case in golden.cases(quick=False)}
    for name, lines in stored.items():
        assert sum("~" not in line for line in lines) > 1, name


def test_a_result_is_shown_as_it_was(golden: Any, tmp_path: Path) -> None:
    bench = golden.GoldenFolder(tmp_path, sys.executable)
    (case,) = (c for c in golden.cases(quick=True) if c.name == "results/batch-v1.json, --json")
    bench.prepare([case])
    stored = json.loads(lzma.decompress(golden.STORE.read_bytes()))["cases"]
    (lines,) = bench.outputs([case], 1).values()
    assert golden.changed(stored[case.name], lines) == []
