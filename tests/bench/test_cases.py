"""bench/cases.py: its table, how screens are judged, and a run of it on a folder of one case."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from helpers_cli import ROOT

pytestmark = pytest.mark.usefixtures("bench_scripts")

OWN = ROOT / "bench" / "case_scripts"
TABLE = """
[commands]
doctor = "trainfit doctor --only cores --script {script} --output {out}"

[case.habit]
section = 4
command = "doctor"
screen = ["retain_graph"]
kinds = ["retain-graph|retain_graph"]
replace = "backward(retain_graph=True)"
by = "backward()"
"""
SCRIPT = """
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    loss = model(torch.zeros(1, 4)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
"""


def table() -> Any:
    return importlib.import_module("_case_table")


def bench() -> Any:
    return importlib.import_module("cases")


def answer(screen: str, *findings: tuple[str, str], status: int = 0) -> Any:
    return table().Answer(screen, findings, status)


def test_each_case_has_its_script_and_another_text_for_its_fault() -> None:
    rows = table().load(OWN)
    assert len(rows) >= 25 and sum(row.has_counterpart for row in rows) >= 25
    assert {row.section for row in rows} == {1, 2, 3, 4, 5}
    for row in rows:
        text = (OWN / row.file).read_text()
        compile(text, row.file, "exec")
        compile(row.fixed_script(text), row.file, "exec")
        assert row.fixed_script(text) != text or not row.has_counterpart
        assert row.first or row.screen or row.kinds or row.never
    used = {row.file for row in rows} | {"common.py"}
    assert {file.name for file in OWN.glob("*.py")} == used


def case(**values: Any) -> Any:
    return table().FaultCase(name="case", command="", **values)


def test_what_has_to_be_said_is_looked_for_where_it_has_to_stand() -> None:
    one = case(first=("^Fits",), screen=("drop_last",), kinds=("a|b",), never=("batch-size=1\\b",))
    said = answer("Fits:\n  12 MiB" + "\n" * 20 + "set drop_\nlast", ("c", "info"))
    wrong = table().faults(one, said)
    assert wrong == ["the screen lacks 'drop_last'", "no finding a|b (found: c)"]
    late = answer("\n" * 20 + "Fits drop_last --batch-size=1", ("b", "warning"))
    assert table().faults(one, late) == [
        "first lines lack '^Fits'",
        "the screen has 'batch-size=1\\\\b'",
    ]
    assert not table().faults(one, answer("Fits drop_last batch-size=16", ("b", "info")))


def test_a_fixed_script_has_no_finding_and_no_word_of_its_former_fault() -> None:
    one = case(first=("lock",), kinds=("a|b",), allow=("d",))
    said = answer(
        "a lock", ("b", "info"), ("c", "warning"), ("d", "critical"), ("cpu_contention", "warning"),
        ("e", "info"), status=1,
    )  # fmt: skip
    assert table().alarms(one, said) == [
        "finding b (info)", "finding c (warning)", "first lines have 'lock'", "exit status 1",
    ]  # fmt: skip
    fits = case(first=("(?i)not fit",), fixed=("^Fits",))
    assert not table().alarms(fits, answer("Fits"))
    assert table().alarms(fits, answer("It does")) == ["first lines lack '^Fits'"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[case.habit]\nsection = 1", "case habit: no command"),
        ("[case.habit]\ncommand = 'x'\nwords = []", "case habit: unknown words"),
        ("[case.other]\ncommand = 'x'", "case other: there is no other.py"),
        ("[case.habit\n", "cases.toml: "),
    ],
)
def test_a_table_that_cannot_be_used_says_why(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "habit.py").write_text(SCRIPT)
    (tmp_path / "cases.toml").write_text(text)
    with pytest.raises(table().TableError, match=said):
        table().load(tmp_path)
    with pytest.raises(table().TableError, match="--cases expects a folder with it"):
        table().load(tmp_path / "absent")


def test_text_that_does_not_stand_there_once_is_no_fix() -> None:
    with pytest.raises(table().TableError, match="'x = 1' stands 2 times"):
        case(replace="x = 1", by="x = 2").fixed_script("x = 1\nx = 1\n")


@pytest.mark.slow
def test_a_folder_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cases.toml").write_text(TABLE)
    (tmp_path / "habit.py").write_text(SCRIPT)
    assert bench().main(["--cases", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    values = {each["name"]: each["value"] for each in found["figures"]}
    assert values == {"cases_section_4": 100.0, "cases_right": 100.0, "cases_false_alarms": 0}
    assert printed.err.startswith("habit") and "right" in printed.err
    assert (tmp_path / "habit.py").read_text() == SCRIPT


def test_only_and_quick_choose_cases(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table().load(OWN)
    few = bench().chosen(rows, None, quick=True)
    assert len(few) == 10 and {row.section for row in few} == {1, 2, 3, 4, 5}
    assert [row.name for row in bench().chosen(rows, ["lock"], quick=False)] == ["lock"]
    with pytest.raises(SystemExit):
        bench().main(["--only", "absent"])
    assert "no case absent; there are evaluation_kept, " in capsys.readouterr().err
