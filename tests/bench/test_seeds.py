"""The table of the seeds: every row has a command that parses and a check, and is on the page."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from helpers_cli import json_of, trainfit
from trainfit.cli.parser import read_words

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
PAGE = ROOT / "docs" / "seeds.md"

#: Commands that take a second or two, on recorded machines and by figures alone.
CHEAP = (
    "doctor-cpu",
    "doctor-machine",
    "doctor-script",
    "doctor-server",
    "doctor-cpu-only-torch",
    "doctor-version-mismatch",
    "doctor-no-driver",
    "gpus-t4",
    "gpus-4090",
    "pace-article",
)


@pytest.fixture(scope="module")
def bench(bench_scripts: None) -> Any:
    return importlib.import_module("seeds")


def test_each_row_is_on_the_page_and_nothing_else(bench: Any) -> None:
    read_rows = importlib.import_module("_seeds_page").read_rows
    there = Counter(read_rows(PAGE.read_text("utf-8")))
    wanted = Counter((row.kind, row.claim, row.commands) for row in bench.ROWS)
    assert there == wanted, "make it again: python bench/seeds.py --write docs/seeds.md"
    assert max(wanted.values()) == 1


def test_the_page_has_every_command_as_it_is_run(bench: Any) -> None:
    lines = PAGE.read_text("utf-8").splitlines()
    assert all(command.line in lines for command in bench.COMMANDS.values())


def test_a_page_reads_back_what_was_written(bench: Any) -> None:
    page = importlib.import_module("_seeds_page")
    seeds = importlib.import_module("_seeds")
    row = seeds.Row("t4", "formula", "a | b", ("gpus-t4", "plan-vgg"), lambda: None)
    for verdict in (seeds.agrees("c | d"), None):
        assert list(page.read_rows(page.page([(row, verdict)]))) == [
            ("formula", "a | b", ("gpus-t4", "plan-vgg"))
        ]


def test_every_article_has_rows_with_commands_and_every_command_a_row(bench: Any) -> None:
    assert {row.article for row in bench.ROWS} == set(importlib.import_module("_seeds").ARTICLES)
    used = {name for row in bench.ROWS for name in row.commands}
    files = {name for command in bench.COMMANDS.values() for name in command.after}
    assert used | files == set(bench.COMMANDS)
    for row in bench.ROWS:
        assert row.commands and callable(row.check), row.claim


def test_commands_parse(bench: Any) -> None:
    for command in bench.COMMANDS.values():
        verb, *words = bench.words(command)
        _, options, called = read_words([verb, "--json", *words])
        assert options.json, command.name
        assert "--" not in words or called, command.name


def test_files_are_read_after_they_are_written(bench: Any) -> None:
    done: set[str] = set()
    for command in bench.COMMANDS.values():
        assert set(command.after) <= done, command.name
        done.add(command.name)
        scripts = [word for word in bench.words(command) if word.endswith(".py")]
        assert all((ROOT / word.partition(":")[0]).is_file() for word in scripts), command.name


def test_a_row_without_an_answer_is_open(bench: Any) -> None:
    seeds = importlib.import_module("_seeds")
    row = seeds.Row("act", "formula", "a", ("one",), lambda doc: seeds.agrees(doc["missing"]))
    assert "exit code 2" in bench.judged(row, {}, {"one": "exit code 2: no"}).reason
    lacking = bench.judged(row, {"one": {}}, {})
    assert lacking.verdict is None and "KeyError" in lacking.reason
    silent = seeds.Row("act", "formula", "a", ("one",), lambda doc: None)
    found = bench.judged(silent, {"one": {}}, {})
    open_rows = [each for each in bench.figures([found], {}) if each.name == "seeds_rows_open"]
    assert not open_rows[0].holds
    failed = bench.figures([found], {"one": "exit code 2"})
    assert not next(each for each in failed if each.name == "seeds_commands_failed").holds


def test_figures_tell_a_range_from_what_lies_outside(bench: Any) -> None:
    seeds = importlib.import_module("_seeds")
    assert seeds.within(1.0, 0.5, 1.5, " GiB", "less").outcome == "agrees"
    beyond = seeds.within(1.6, 0.5, 1.5, " GiB", "because of it")
    assert beyond.outcome == "differs" and beyond.text.endswith(": because of it")
    assert seeds.near(70, 75, 0.01, " W", "less").outcome == "differs"
    assert seeds.near(8.14, 8.1, 0.01, "", "more").outcome == "agrees"
    with pytest.raises(LookupError):
        seeds.only([{"name": "a"}, {"name": "a"}], name="a")


@pytest.fixture(scope="module")
def answers(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the cheap commands really answer."""
    folder = tmp_path_factory.mktemp("seeds")
    bench.prepare(folder)
    first, *others = CHEAP
    code, text, error = bench.run(bench.COMMANDS[first], folder, quick=True)
    assert code in bench.COMMANDS[first].exits, error
    found = {first: json.loads(text)}
    for name in others:
        done = trainfit(*bench.typed(bench.COMMANDS[name], quick=True), cwd=folder)
        assert done.returncode in bench.COMMANDS[name].exits, done.stderr
        found[name] = json_of(done)
    return found


def test_rows_of_recorded_machines_and_of_figures_are_answered(
    bench: Any, answers: dict[str, Any]
) -> None:
    rows = [row for row in bench.ROWS if set(row.commands) <= set(CHEAP)]
    assert len(rows) > 20
    for row in rows:
        result = bench.judged(row, answers, {})
        assert result.verdict is not None, (row.claim, result.reason)


@pytest.mark.parametrize(
    ("claim", "outcome", "words"),
    [
        ("75 W", "differs", "70 W"),
        ("320 Tensor cores", "agrees", "320"),
        ("GDDR6", "agrees", "GDDR6"),
        ("A call is slower at 30 Hz than at 60 Hz", "agrees", "cpu_frequency"),
        ("powersave lowers the clock while idle, and explains the excess", "with a condition", ""),
        ("torch.cuda.device_count() is 0", "agrees", "cpu_only_torch, no_driver, version_mismatch"),
    ],
)
def test_verdicts(
    bench: Any, answers: dict[str, Any], claim: str, outcome: str, words: str
) -> None:
    (row,) = [each for each in bench.ROWS if each.claim == claim]
    verdict = bench.judged(row, answers, {}).verdict
    assert (verdict.outcome, words in verdict.text) == (outcome, True), verdict


@pytest.mark.parametrize(
    ("part", "outcome"),
    [
        ({"status": "kept", "present": "1"}, "agrees"),
        ({"status": "set", "value": "1"}, "agrees"),
        ({"status": "set", "value": "2", "present": "1"}, "differs"),
        ({"status": "not set", "present": "1"}, "differs"),
        ({"status": "cannot tell"}, "impossible here"),
        (None, "with a condition"),
    ],
)
def test_rows_on_the_launch_line_read_its_parts_where_a_plan_has_them(
    bench: Any, part: dict[str, str] | None, outcome: str
) -> None:
    launch = importlib.import_module("_seeds_launch")
    seeds = importlib.import_module("_seeds")
    fields = {"value": "", "present": "", "reason": "no gain", "evidence": "measured"}
    parts = [] if part is None else [{"name": "OMP_NUM_THREADS", **fields, **part}]
    found = launch.launch_part(
        {"launch_parts": parts}, "1", seeds.condition("kept"), "OMP_NUM_THREADS"
    )
    assert found.outcome == outcome
    assert part is None or "no gain (measured)" in found.text
