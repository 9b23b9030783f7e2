"""The values of a tunable: the largest that fits, and the table of what they cost."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers_cli import SCRIPTS, trainfit
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.command.tunables import CommandError, placeholders, tunable_named
from trainfit.plan.runs.options import require_named
from trainfit.plan.sizing.attempts import next_value, predicted
from trainfit.plan.sizing.lengths import tunable_to_size
from trainfit.results.runs.script import ScriptOption

pytestmark = pytest.mark.usefixtures("warm", "brief")

SCRIPT = SCRIPTS / "sequences.py"


@functools.cache
def planned(*words: str, solve: str = "seq_len") -> Any:
    options = ["--solve", solve] if solve else []
    said = trainfit(
        *("plan", "--gpu", "custom:1GiB", "--headroom", "5%", "--no-remedies", "--json", *options),
        *("--", "python", SCRIPT, *words),
        cwd=SCRIPTS,
    )
    assert said.stdout, said.stderr
    return json.loads(said.stdout)


def needs(sizes: Any, batch: int) -> dict[int, int]:
    return {p["value"]: p["device_bytes"] for p in sizes["points"] if p["batch_size"] == batch}


@pytest.mark.slow
def test_attention_that_is_materialised_grows_with_the_square() -> None:
    sizes = planned("--max-length=512", "--attention=eager")["sizes"]
    assert (sizes["shown"], sizes["present"], sizes["growth"]) == ("--max-length", 512, "quadratic")
    assert sizes["quadratic_in"] == "Model.attention"
    assert 512 < sizes["largest"] < sizes["too_large"] <= sizes["largest"] + 64
    here = [p for p in sizes["points"] if p["batch_size"] == 4]
    assert all(p["is_simulated"] for p in here)
    assert {p["value"]: p["fits"] for p in here}[sizes["too_large"]] is False
    at_two = needs(sizes, 2)
    assert needs(sizes, 4)[max(at_two)] > at_two[max(at_two)]
    assert f"--max-length={sizes['recommended']}" in sizes["command"]
    other = {each["batch_size"]: each["value"] for each in sizes["limits"]}
    assert other[2] > sizes["largest"] > other[8]


@pytest.mark.slow
def test_flash_attention_grows_in_proportion() -> None:
    flash = planned("--max-length=512")["sizes"]
    assert (flash["growth"], flash["quadratic_bytes"]) == ("linear", 0)
    assert (
        flash["largest"] > 4 * planned("--max-length=512", "--attention=eager")["sizes"]["largest"]
    )


@pytest.mark.slow
def test_what_the_model_allows_ends_the_search() -> None:
    sizes = planned("--max-length={seq_len:256}", "--positions=1000")["sizes"]
    assert (sizes["largest"], sizes["limit"]) == (1000, 1000)
    assert "1,000 positions" in sizes["limit_reason"]


@pytest.mark.slow
def test_what_the_data_set_allows_ends_the_search() -> None:
    sizes = planned("--max-length=256", "--samples=300")["sizes"]
    assert sizes["limit"] == 300 and "300 tokens" in sizes["limit_reason"]


@pytest.mark.slow
def test_a_marked_length_has_its_table_without_a_search() -> None:
    result = planned("--max-length={block_size:256}", "--positions=200", solve="")
    sizes = result["sizes"]
    assert sizes["largest"] is None and sorted(needs(sizes, 4)) == [128, 200, 256]
    assert any("longer than the 200 positions" in note for note in result["notes"])


def test_the_screen_has_the_answer_first(tmp_path: Path) -> None:
    said = trainfit(
        *("plan", "--gpu", "custom:1GiB", "--no-remedies", "--solve", "max-length"),
        *("--", "python", SCRIPT, "--positions=1000"),
        cwd=tmp_path,
    )
    first = " ".join(said.stdout.split("\n  python")[0].split())
    assert "Largest --max-length at batch size 4: 1,000" in first


def test_names_of_lengths() -> None:
    assert placeholders(["--cutoff_len={cutoff_len:2048}"]) == {"seq_len": "2048"}
    assert placeholders(["--size={size:3}"]) == {}
    assert placeholders(["--size={size:3}"], "size") == {"size": "3"}
    assert tunable_named("--block-size") == "seq_len" and tunable_named("width") == "width"
    for text in ("a b", "", "batch_size"):
        with pytest.raises(CommandError, match="--solve"):
            tunable_named(text)
    with pytest.raises(CommandError, match="expected a sequence length"):
        placeholders(["{seq_len:long}"])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "the script has no such option"),
        ((ScriptOption(("--seq_len",), "seq_len", "0.5", False),), "not a positive integer"),
        (
            (
                ScriptOption(("--block_size",), "block_size", "8", False),
                ScriptOption(("--max_length",), "max_length", "8", False),
            ),
            "several options have this meaning",
        ),
    ],
)
def test_a_length_that_is_not_there(options: tuple[ScriptOption, ...], reason: str) -> None:
    command = parse_command(["python", str(SCRIPT)])
    with pytest.raises(CommandError, match=reason):
        tunable_to_size(command, options, "seq_len")
    assert tunable_to_size(command, options, "") is None


def test_where_to_look_next() -> None:
    square = {v: 100 + 3 * v * v for v in (8, 16, 32)}
    assert predicted(square, 100 + 3 * 50 * 50, 32) in (49, 50)
    assert predicted({10: 100, 20: 200}, 450, 20) == 45
    assert predicted({10: 100}, 450, 10) == 20 and predicted({10: 100}, 50, 0) == 5


@pytest.mark.parametrize("needed", [lambda v: 3 * v, lambda v: v * v // 1000 + v, lambda v: v**3])
@pytest.mark.parametrize("budget", [5_000, 29_950, 200_003])
def test_a_search_ends_next_to_where_memory_ends(needed: Callable[[int], int], budget: int) -> None:
    needs, step = {16: needed(16)}, 16
    for _ in range(8):
        low = max((v for v in needs if needs[v] <= budget), default=0)
        high = min((v for v in needs if needs[v] > budget), default=None)
        value = next_value(needs, budget, low, high, step, furthest=8)
        if value is None:
            break
        assert low < value and (high is None or value < high) and value % step == 0
        needs[value] = needed(value)
    assert value is None and high is not None
    assert high - low <= max(step, low // 64)


def test_values_that_fit_against_what_they_need_are_passed_by_more_each_time() -> None:
    # All of them need more than there is, and fit.
    needs = {v: 100 * v for v in (512, 8192, 9216)}
    value = next_value(needs, 400_000, 9216, None, 64, furthest=8)
    assert value == 9216 + 1024
    # Nothing within the bracket is where it is to be: its middle.
    assert next_value({**needs, 10_240: 101 * 10_240}, 400_000, 9216, 10_240, 64, 8) == 9728


def test_a_name_that_the_script_has_nowhere_is_refused_before_any_run(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import argparse\nNAMES = ['--window-size']\n")
    plain = tmp_path / "train.py"
    plain.write_text("import torch, helper\n")
    command = parse_command(["python", str(plain)])
    require_named(command, "window_size")
    with pytest.raises(CommandError, match="--solve window: the script has no such option"):
        require_named(command, "window")
    # Options of a library, and those of a file, are seen in a run only.
    plain.write_text("import transformers\n")
    require_named(parse_command(["python", str(plain)]), "window")
    plain.write_text("import torch\n")
    (tmp_path / "values.ini").touch()
    require_named(parse_command(["python", str(plain), str(tmp_path / "values.ini")]), "window")


def test_a_plan_for_such_a_name_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('it-ran', 'w')")
    words = ("plan", "--gpu", "T4", "--solve", "window", "--", "python", "train.py")
    said = trainfit(*words, cwd=tmp_path)
    assert said.returncode == 2 and "simulating" not in said.stderr
    assert "no such option" in said.stderr.splitlines()[-1]
