"""Scripts that may leave their model in evaluation mode, by their loops alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainfit.lint.modes import may_stay_in_evaluation

EVALUATE = "def evaluate(model):\n    model.eval()\n    for x in test:\n        model(x)\n"
EPOCHS = "for epoch in range(3):\n    for x in train_data:\n        step(model, x)\n"


@pytest.mark.parametrize(
    ("script", "may"),
    [
        (EVALUATE + "model.train()\n" + EPOCHS + "    evaluate(model)\n", True),
        (EVALUATE + EPOCHS + "    evaluate(model)\n", True),
        (EVALUATE + EPOCHS + "    evaluate(model)\n    model.train()\n", False),
        (EVALUATE + "    model.train()\n" + EPOCHS + "    evaluate(model)\n", False),
        (EVALUATE + EPOCHS + "evaluate(model)\n", False),
        (
            EVALUATE + "def train(model):\n    model.train()\n"
            "for epoch in range(3):\n    train(model)\n    evaluate(model)\n",
            False,
        ),
        (
            EVALUATE + "def train(model):\n    for x in data:\n        step(model, x)\n"
            "for epoch in range(3):\n    train(model)\n    evaluate(model)\n",
            True,
        ),
        (EVALUATE + EPOCHS + "    evaluate(model)\n    model.training = True\n", False),
        (EPOCHS, False),
        ("def broken(:\n", False),
    ],
)
def test_loops_that_switch_to_evaluation_alone(tmp_path: Path, script: str, may: bool) -> None:
    path = tmp_path / "train.py"
    path.write_text(script)
    assert may_stay_in_evaluation(path) is may


def test_what_an_imported_file_does(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(EVALUATE)
    path = tmp_path / "train.py"
    path.write_text("from steps import evaluate\n" + EPOCHS + "    evaluate(model)\n")
    assert may_stay_in_evaluation(path)


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    assert not may_stay_in_evaluation(tmp_path / "none.py")
