"""Loops of Lightning, Transformers and Accelerate: watched, they train to the last bit as alone."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers_cli import environment, trainfit
from trainfit.results.runs.tables import CHECKPOINT, EPOCH_START, EVALUATION
from trainfit.results.runs.watched import load_run
from trainfit.results.watch import WatchResult

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("frameworks.py")
EPOCHS, STEPS, BATCH = 3, 36, 8


@pytest.mark.parametrize(
    ("loop", "package", "framework"),
    [
        ("accelerated", "accelerate", "Accelerate"),
        ("lightning", "lightning", "Lightning"),
        ("trainer", "transformers", "Transformers"),
    ],
)
def test_the_loop_of_a_framework(loop: str, package: str, framework: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    words = [sys.executable, str(SCRIPT), loop]
    alone = subprocess.run(
        [*words, str(tmp_path / "alone")], env=environment(), capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    watched = trainfit(
        "watch", "--quiet", "--folder", tmp_path / "run", "--output", tmp_path / "r.json", "--",
        *words, tmp_path / "watched", cwd=tmp_path, PYTHONUNBUFFERED="1",
    )  # fmt: skip
    assert watched.returncode == 0, watched.stderr
    told, expected = (re.findall(r"^0x.*$", each.stdout, re.MULTILINE) for each in (watched, alone))
    assert len(told) == STEPS and told == expected
    losses = [float.fromhex(line) for line in told]

    (rank,) = load_run(tmp_path / "run").ranks
    steps, header = rank.steps, rank.header
    assert (header.framework, header.optimizer, header.ending) == (framework, "AdamW", "finished")
    assert len(steps) == STEPS and set(steps["samples"]) == {BATCH}
    np.testing.assert_allclose(steps["loss"], losses, rtol=1e-6)
    for phase in ("input_s", "forward_s", "backward_s", "optimizer_s"):
        assert (steps[phase] > 0).all(), phase
    assert np.sum((steps["flags"] & EPOCH_START) != 0) == EPOCHS
    # What follows the last step is told by events alone.
    for flag, kind in ((EVALUATION, "evaluation"), (CHECKPOINT, "checkpoint")):
        assert np.sum((steps["flags"] & flag) != 0) >= EPOCHS - 1, kind
        assert sum(event.kind == kind for event in rank.events) >= EPOCHS, kind

    result = WatchResult.load(tmp_path / "r.json")
    named = {each.name for each in result.phases if each.host_s > 0}
    assert {"input", "forward", "backward", "optimizer", "evaluation", "checkpoint"} <= named
