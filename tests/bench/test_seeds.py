"""The page of the seeds: each row has commands that are on it, and they parse and answer."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path
from typing import Any

import pytest

from trainfit.cli.parser import read_words

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench(bench_scripts: None) -> Any:
    return importlib.import_module("seeds")


@pytest.fixture(scope="module")
def page(bench: Any) -> str:
    text: str = bench.PAGE.read_text("utf-8")
    return text


def test_each_row_has_its_commands_and_each_command_a_row(bench: Any, page: str) -> None:
    rows, commands = list(bench.rows_of(page)), bench.commands(page)
    assert len(rows) == 192  # the sum of the page's first table
    used = {name for _, _, names, _ in rows for name in names}
    assert used <= set(commands)
    written = {shlex.split(line.partition("--output ")[2])[0] for line in commands.values()
               if "--output " in line}  # fmt: skip
    read = {name for name in commands if name not in used}
    assert all(any(f in commands[name] for f in written) for name in read)
    verdicts = ("agrees", "differs", "with a condition", "answered", "impossible here")
    assert all(verdict.startswith(tuple(f"**{each}**" for each in verdicts))
               for *_, verdict in rows)  # fmt: skip


def test_the_counts_are_those_of_the_rows(bench: Any, page: str) -> None:
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    counts = [cells for cells in lines if cells[-1].isdigit()]
    rows = list(bench.rows_of(page))
    assert sum(int(count[1]) for count in counts) == len(rows)
    for place, outcome in enumerate(("agrees", "differs", "with a condition", "answered"), start=2):
        found = sum(verdict.startswith(f"**{outcome}**") for *_, verdict in rows)
        assert sum(int(count[place]) for count in counts) == found, outcome


def test_commands_parse_and_name_scripts_that_are_there(bench: Any, page: str) -> None:
    for name, line in bench.commands(page).items():
        words = shlex.split(line)
        verb, *rest = words[words.index("trainfit") + 1 :]
        _, options, called = read_words([verb, "--json", *rest])
        assert options.json and ("--" not in rest or called), name
        scripts = [word for word in words if ".py" in word]
        assert all((ROOT / word.partition(":")[0]).is_file() for word in scripts), name


@pytest.mark.slow
def test_a_recorded_machine_still_answers_and_a_broken_command_does_not(
    bench: Any, tmp_path: Path
) -> None:
    bench.prepare(tmp_path, article=False)
    assert (
        bench.run("trainfit doctor --cpu --machine tests/machines/workstation.json", tmp_path) == ""
    )
    assert "no JSON" in bench.run("trainfit doctor --machine none.json", tmp_path)
