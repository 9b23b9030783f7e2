"""Tables of step times: what is read, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainfit.results.batch import StepTime, read
from trainfit.results.files.errors import ResultFileError


def test_a_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("micro_batch, accumulation, gpus, seconds\n8, 2, 1, 0.1\n16, 1, 4, 0.2\n")
    assert read(path) == (StepTime(8, 2, 1, 0.1), StepTime(16, 1, 4, 0.2))
    assert read(path)[1].batch_size == 64 and read(path)[1].throughput == 320
    path.write_text("seconds,micro_batch\n0.1,8\n")
    assert read(path) == (StepTime(8, 1, 1, 0.1),)


def test_a_plans_steps_are_read() -> None:
    plan = Path(__file__).parents[2] / "fixtures" / "results" / "plan-v1.json"
    curve = json.loads(plan.read_text())["speed"]["curve"]
    found = read(plan)
    assert [each.micro_batch for each in found] == [step["batch_size"] for step in curve]
    assert {each.basis for each in found} == {"predicted"}
    assert {each.accumulation for each in found} == {1}


def test_a_plans_steps_have_the_scripts_accumulation(tmp_path: Path) -> None:
    step = {"batch_size": 8, "seconds": 0.5, "samples_per_s": 64.0}
    unknown = {"batch_size": 16, "seconds": 0.9, "samples_per_s": None}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"speed": {"curve": [step, unknown]}}))
    assert read(path) == (StepTime(8, 4, 1, 0.5, "predicted"),)


def test_a_spreadsheets_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("\ufeffmicro_batch,seconds\n8,0.1\n", encoding="utf-8")
    assert read(path) == (StepTime(8, 1, 1, 0.1),)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no column 'micro_batch'"),
        ("batch,seconds\n8,1\n", "no column 'micro_batch'"),
        ("micro_batch,seconds\n", "no row"),
        ("micro_batch,seconds,loss\n8,1,2\n", "'loss' is not known"),
        ("micro_batch,micro_batch,seconds\n8,9,2\n", "one name"),
        ("micro_batch,seconds\n8,1,2\n", "more values than columns"),
        (f"micro_batch,seconds\n{10**30},1\n", "at most"),
        ("micro_batch,seconds\n8,fast\n", "line 2"),
        ("micro_batch,seconds\n8,1\n8,nan\n", "line 3"),
        ("micro_batch,seconds\n0,1\n", "line 2"),
        ("micro_batch,seconds\n8\n", "line 2"),
        ("micro_batch,seconds\n8,1\n8,2\n", "twice"),
        ("{}", "no step times"),
        ('{"speed": {"curve": [{}]}}', "no step times"),
    ],
)
def test_a_bad_table_is_refused_in_one_line(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text(text)
    with pytest.raises(ResultFileError, match=reason) as caught:
        read(path)
    assert "\n" not in str(caught.value)
