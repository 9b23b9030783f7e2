"""What a terminal shows while simulated runs and measurements go on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from trainfit.cli.progress_bar import (
    ProgressLines,
    TerminalProgress,
    answer_text,
    seconds_left,
    status_text,
)
from trainfit.plan.dataloader.process import Stage
from trainfit.plan.runs.progress import FirstAnswer
from trainfit.results.runs.trace import RunStatus

HALF = RunStatus(steps=2, least=3, most=12, seconds=10.0, loading_s=4.0)


class Screen:
    """A terminal of 120 columns that keeps what is written, and a clock that is set."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.now = 0.0
        console = Console(file=self.stream, force_terminal=True, width=120, no_color=True)
        self.progress = TerminalProgress(console, clock=lambda: self.now)

    @property
    def tasks(self) -> list[str]:
        return [task.description for task in self.progress._bars.tasks]


def test_runs_show_their_number_step_and_time_left() -> None:
    screen = Screen()
    with screen.progress as shown:
        shown.expect(4)
        shown.begin(1, "simulating a.py at batch size 8")
        shown.begin(2, "simulating a.py at batch size 16")
        shown.status(2, HALF)
        assert screen.tasks[0] == "1 of 4 runs, 0 s"
        assert screen.tasks[2] == (
            "simulating a.py at batch size 16: step 2 of 3 to 12, 40% of the time in its DataLoader"
        )
        screen.now = 10.0
        shown.end(1)
        # 10 s a run: the second is over soon, and two are still to come, two at a time.
        assert screen.tasks[0] == "2 of 4 runs, 10 s, about 10 s left"
    assert "about 10 s left" in screen.stream.getvalue()


def test_the_first_answer_stays_on_the_screen() -> None:
    screen = Screen()
    answer = FirstAnswer(8, True, 5 << 30, 24 << 30, 0.079)
    with screen.progress as shown:
        shown.first_answer(answer)
    text = "first answer: the first steps fit, 5.00 GiB of 24.00 GiB at batch size 8, 79 ms a step"
    assert answer_text(answer) == text
    assert f"trainfit: {text}" in screen.stream.getvalue()
    unknown = FirstAnswer(None, False, 5 << 30, 1 << 30, None)
    assert answer_text(unknown) == "first answer: does not fit, 5.00 GiB of 1.00 GiB"


def test_measurements_estimate_the_time_from_the_share_that_is_done() -> None:
    screen, shown = Screen(), []
    for stage in (
        Stage("running train.py", 2.0, None),
        Stage("1 worker", 5.0, 0.0),
        Stage("2 workers", 12.5, 0.25),
        Stage("2 workers", 40.0, 0.25),
    ):
        screen.progress.stage(stage)
        shown.append(screen.tasks[0])
    assert shown == [
        "2 s: running train.py",
        "5 s: 1 worker",
        "12 s of about 35 s: 2 workers",
        "40 s of about 2 min 25 s: 2 workers",
    ]


def test_no_escape_of_a_script_reaches_the_terminal() -> None:
    screen = Screen()
    screen.progress.begin(1, "a\x1b[2J[bold]b")
    screen.progress("c\x1b")
    assert screen.tasks == ["c\\x1b", "a\\x1b[2J[bold]b"]


def test_elsewhere_runs_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLines() as lines:
        lines.begin(1, "simulating a.py\x1b")
        lines.status(1, HALF)
        lines.end(1)
        lines.first_answer(FirstAnswer(8, True, 1 << 30, 2 << 30, None))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "trainfit: simulating a.py\\x1b …",
        "trainfit: first answer: the first steps fit, 1.00 GiB of 2.00 GiB at batch size 8",
    ]


@pytest.mark.parametrize(
    ("took", "running", "expected", "left"),
    [
        ([], [3.0], 4, None),
        ([10.0], [4.0], 2, 6.0),
        ([10.0], [12.0], 2, 0.0),
        ([8.0, 12.0], [], 4, 10.0),
    ],
)
def test_seconds_left(
    took: list[float], running: list[float], expected: int, left: float | None
) -> None:
    assert seconds_left(took, running, expected) == left


def test_a_run_that_loads_quickly_is_not_said_to_load() -> None:
    quick = RunStatus(steps=1, least=2, most=2, seconds=10.0, loading_s=0.1)
    assert status_text(quick) == "step 1 of 2"
    assert RunStatus(0, 1, 1, 0.0, 0.0).loading_share == 0.0
