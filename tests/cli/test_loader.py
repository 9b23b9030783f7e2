"""The verb ``trainfit loader``: its options, bad input, result files, the progress bar."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from helpers_cli import ROOT, SCRIPTS, error_line, json_of, trainfit
from helpers_loader import result
from helpers_report import whole
from trainfit.cli.main import main
from trainfit.cli.plan_options import step_time
from trainfit.cli.progress_bar import ProgressLines
from trainfit.cli.verbs import loader
from trainfit.hardware import find_gpu
from trainfit.plan.dataloader.measurement import Tuned
from trainfit.plan.dataloader.process import Stage
from trainfit.report.sections.loader import loader_subject
from trainfit.results.loader import LoaderResult
from trainfit.results.runs.measurement import Consumer
from trainfit.results.runs.spec import LoaderSpec, RunSpec, TuningSpec
from trainfit.results.text import laid_out_for

pytestmark = pytest.mark.usefixtures("warm_measuring")

STUB = f"{ROOT / 'tests' / 'tuning_stub'}{os.pathsep}{ROOT / 'tests'}{os.pathsep}{ROOT / 'src'}"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the verb asks the planner for, which answers with a fixture."""
    calls: list[Any] = []

    def tune(
        command: Any, spec: RunSpec, progress: Any, *, sandbox: Any, fills_options: bool
    ) -> Tuned:
        assert fills_options
        calls.append((command, spec))
        return Tuned(result(), None)

    monkeypatch.setattr(loader, "tune_command", tune)
    return calls


def test_a_command_is_tuned_and_its_result_shown_again(tmp_path: Path) -> None:
    """All of it but the tuner: its stub says what it was given."""
    done = trainfit(
        *("loader", "--explain", "--step-time", "40ms", "--confirm", "1"),
        *("--output", "tuned.json"),
        *("--", "python", SCRIPTS / "infer.py"),
        cwd=tmp_path,
        PYTHONPATH=STUB,
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())  # where lines break depends on the path of the checkout
    assert "infer.py:24: TensorDataset, batch size 64" in said
    assert "a step 40 ms: given" in said
    assert '"confirm": 1' in said
    assert "infer.py until its first step" in done.stderr and "2 workers" in done.stderr
    again = trainfit("show", "--explain", "tuned.json", cwd=tmp_path)
    assert again.stdout == done.stdout
    document = json_of(trainfit("show", "--json", "tuned.json", cwd=tmp_path))
    assert document["format"] == "trainfit-loader" and document["step_s"] == 0.04


def test_a_script_without_a_loader_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("import torch\ntorch.ones(1).cuda()")
    done = trainfit("loader", "python", "bare.py", cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert error_line(done).startswith("bare.py: it creates no DataLoader: nothing to tune")


def test_a_callable_that_cannot_be_found_is_told_in_one_line(tmp_path: Path) -> None:
    done = trainfit("loader", "--loader", "absent:make", cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert "--loader 'absent:make': there is no module 'absent'" in error_line(done)


def test_options_are_passed_on(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    script = str(SCRIPTS / "train.py")
    words = "--step-time 0.05 --gpu a100-80gb-sxm --probe-time 5 --confirm 0 --max-workers 7"
    more = "--ranks 2 --time-limit 90"
    assert main(["loader", "--explain", *words.split(), *more.split(), "--", "python", script]) == 0
    command, spec = asked.pop()
    assert command.name == script
    tuning = TuningSpec(
        step=Consumer(0.05, source="given"), seconds=5.0, confirm=0, max_workers=7, ranks=2
    )
    gpu = find_gpu("a100-80gb-sxm")
    assert spec == RunSpec(gpu=gpu, time_limit_s=90.0, loading=LoaderSpec(tuning))
    with laid_out_for(80):
        assert capsys.readouterr().out == whole(loader_subject(result())) + "\n"
    assert main(["loader", "--json", "--loader", "data:make", "--batch-size", "8"]) == 0
    command, spec = asked.pop()
    assert command is None and (spec.loading.place, spec.loading.batch_size) == ("data:make", 8)
    assert LoaderResult.from_json(capsys.readouterr().out, Path("x")) == result()


@pytest.mark.usefixtures("asked")
def test_the_result_is_saved_before_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader of a pipe that is gone (`| head -1`) costs no measurement."""
    saved = tmp_path / "loader.json"

    def gone(*_: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("trainfit.cli.output.print_lines", gone)
    monkeypatch.setattr("trainfit.cli.main.discard_output", lambda: None)
    assert main(["loader", "--output", str(saved), "--loader", "data:make"]) == 141
    assert LoaderResult.load(saved) == result()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "no command: write the training command after --"),
        ("--loader a:b python x.py", "give either --loader or a command, not both"),
        ("--batch-size 4 python x.py", "--batch-size applies to a data set given by --loader"),
        ("python absent.py", "there is no such file; check the path"),
        ("--output absent/x.json --loader a:b", "its folder does not exist; create it first"),
        ("--output . --loader a:b", "is a folder; name a file in it"),
        ("--time-limit 10 --loader a:b", "--time-limit 10 includes --probe-time 20: raise"),
        ("--step-time 0 --loader a:b", "expected a time of a step above 0 and up to an hour"),
        ("--step-time -4ms --loader a:b", "such as 0.04 or 40ms, got '-4ms'"),
        ("--step-time nan --loader a:b", "got 'nan'"),
        ("--step-time 1e9 --loader a:b", "got '1e9'"),
        ("--step-time 4000 --loader a:b", "got '4000'"),
        ("--probe-time 0 --loader a:b", "expected a positive number of seconds, got '0'"),
        ("--confirm 5 --loader a:b", "expected a number of runs from 0 to 4, got '5'"),
        ("--max-workers 0 --loader a:b", "expected a positive integer, got '0'"),
        ("--ranks x --loader a:b", "expected a positive integer, got 'x'"),
        ("--ranks 1000000 --loader a:b", "expected up to 64 processes on this machine"),
        ("--gpu nonsense --loader a:b", "--loader has no training step to simulate"),
    ],
)
def test_bad_input(
    words: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is started.
    monkeypatch.setattr("trainfit.plan.dataloader.measurement.LoadingProcess", None)
    try:
        code = main(["loader", *words.split()])
    except SystemExit as error:  # argparse
        code = error.code if isinstance(error.code, int) else 0
    captured = capsys.readouterr()
    assert code == 2 and not captured.out
    (line,) = [line for line in captured.err.splitlines() if "error: " in line]
    assert told in line


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0.04", 0.04), ("40ms", 0.04), ("40 ms", 0.04), ("800us", 8e-4), ("2s", 2.0), (".5", 0.5)],
)
def test_times_of_a_step(text: str, seconds: float) -> None:
    assert step_time(text) == pytest.approx(seconds)


# -- progress ----------------------------------------------------------------------------------


def test_elsewhere_each_stage_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLines() as lines:
        lines.stage(Stage("2 workers\x1b", 1.0, 0.5))
        lines.tick(Stage("2 workers\x1b", 2.0, 0.5))
        lines.stage(Stage("2 workers\x1b", 3.0, 0.6))
    assert capsys.readouterr().err == "trainfit: 2 workers\\x1b …\n"
