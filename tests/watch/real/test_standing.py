"""Real runs that stand still, which is said live and at the end; and own code with its line."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers_cli import trainfit
from helpers_watch import finding
from trainfit.report.watch import answer
from trainfit.results.runs.watched import load_run
from trainfit.watch.judge import judge

SCRIPT = Path(__file__).with_name("stands_still.py")
#: Seconds that a busy machine may take to get there.
PATIENCE_S = 120.0


def line_of(text: str) -> int:
    lines = SCRIPT.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "who"),
    [("worker", "a DataLoader worker"),
     ("main", "the main thread")],
)  # fmt: skip
def test_a_standstill_is_said_live_and_at_the_end(where: str, who: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "trainfit", "watch", "--plain", "--folder", tmp_path / "run"]
    output = tmp_path / "said"
    with output.open("w") as said:
        run = subprocess.Popen(
            [*map(str, words), "--", sys.executable, str(SCRIPT), where],
            stderr=said,
            stdout=said,
            cwd=tmp_path,
            start_new_session=True,  # no terminal sends it the signal, too
        )
    until = time.monotonic() + PATIENCE_S
    while "No step for" not in output.read_text() and time.monotonic() < until:
        time.sleep(0.2)
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    line = line_of(f"the {where if where == 'worker' else 'main thread'} never returns")
    live = next(row for row in output.read_text().splitlines() if "No step for" in row)
    assert live.startswith("trainfit: No step for") and who in live
    assert f"{SCRIPT.name}:{line}" in live
    result = judge(load_run(tmp_path / "run"))
    found = result.findings[0]
    assert (
        found.kind == "standstill"
        and found.at.line == line
        and found.last_step == 30 + (where == "main")
    )
    assert who in answer(result)


@pytest.mark.slow  # a busy machine may leave it too few looks
def test_the_line_of_the_scripts_own_code_is_named(tmp_path: Path) -> None:
    done = trainfit(
        *("watch", "--quiet", "--folder", tmp_path / "run", "--"),
        *(sys.executable, SCRIPT, "sleeps"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = finding(judge(load_run(tmp_path / "run")), "other_code")
    assert found.at.line == line_of("# in each step") and Path(found.at.file).name == SCRIPT.name
    assert "sleeps" in found.title and "time.sleep" in found.title
    assert found.share is not None and found.share > 0.3
