"""The constant of a script that is its batch size."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from trainfit.plan.command.file_values import batch_constant
from trainfit.plan.command.parsing import parse_command
from trainfit.scripts.option_parsers import constants_of, with_constants

SCRIPT = """# what it is
import math
batch_size, other = 3, 4
bs = 8
seed: int = 5
steps = 10
steps += 1
amp = True
rate = 1e-3
a = b = 7
val_batch_size = 8
def train():
    batch = 8
"""


def test_whole_numbers_that_are_assigned_once_at_the_top_level() -> None:
    found = constants_of(ast.parse(SCRIPT))
    assert {name: node.value for name, node in found.items()} == {
        "bs": 8, "seed": 5, "val_batch_size": 8,
    }  # fmt: skip


def test_a_script_with_other_constants_is_the_same_otherwise() -> None:
    before: dict[str, object] = {}
    after: dict[str, object] = {}
    exec(compile(SCRIPT, "train.py", "exec", dont_inherit=True), before)
    exec(with_constants(SCRIPT.encode(), "train.py", {"bs": 16, "steps": 1, "none": 2}), after)
    changed = {name for name in before if name != "train" and before[name] != after[name]}
    assert changed - {"__builtins__"} == {"bs"} and after["bs"] == 16
    train = after["train"]
    assert train.__code__.co_filename == "train.py"  # type: ignore[attr-defined]
    assert train.__code__.co_firstlineno == 12  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("script", "seen", "place"),
    [
        (SCRIPT, 8, "train.py:4"),
        (SCRIPT, 16, None),  # not what was seen
        (SCRIPT, None, None),
        (SCRIPT + "batch = 8\n", 8, None),  # which?
        ("bs = 8\nif True:\n    bs = 8\n", 8, "train.py:1"),  # a run shows what counts
        ("def broken(:\n", 8, None),
    ],
)
def test_the_constant_that_is_the_batch_size(
    script: str, seen: int | None, place: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    found = batch_constant(parse_command(["python", "train.py"]), seen)
    assert (found.place if found is not None else None) == place
