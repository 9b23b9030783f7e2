"""One recommended change tried: which one, in which order, and what is said of it."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers_cli import error_line, json_of, trainfit
from tests.watch.test_compare import header, loader, noise, run
from trainfit.cli.verbs.watched import _FilledCommand as Filled
from trainfit.report.sections.comparison import tried_subject
from trainfit.report.writers.terminal import screen
from trainfit.results.findings import Finding, Fix, Severity
from trainfit.results.runs.watched import RunRecord
from trainfit.results.watch import AdviceVerification, WatchResult
from trainfit.watch.verify import ShortRunError, _Errors, short_run, verify

COMMAND = ("python", "train.py", "--workers={num_workers:0}")


def finding(severity: Severity = "critical", line: str = "", **settings: str) -> Finding:
    return Finding(
        "slow",
        severity,
        "It is slow",
        (),
        "because",
        (Fix("do it", settings=settings, line=line),),
        "certain",
    )


class Runs:
    """Runs whose steps take what ``seconds`` says for the words and variables given."""

    def __init__(self, seconds: Any, **what: Any) -> None:
        self.seconds, self.what = seconds, what
        self.random = np.random.default_rng(4)
        self.asked: list[str] = []
        self.told: list[str] = []

    def __call__(self, words: Sequence[str], variables: Mapping[str, str]) -> RunRecord:
        self.asked.append(" ".join([*(f"{k}={v}" for k, v in variables.items()), *words]))
        workers = next((int(word[10:]) for word in words if word.startswith("--workers=")), 0)
        what = {"loaders": (loader(num_workers=workers),), "variables": dict(variables)}
        seconds = self.seconds(workers, variables)
        return run(seconds * noise(self.random, 90), **(what | self.what))

    def verify(
        self, *findings: Finding, command: Sequence[str] = COMMAND, count: int = 5, **variables: str
    ) -> AdviceVerification:
        def judge(record: RunRecord) -> WatchResult:
            return WatchResult(
                header(), 90, 9.0, 0.1, None, None, (), limit="input", findings=findings
            )

        return verify(Filled(command), self, judge, self.told.append, variables, count=count)


def text(result: AdviceVerification) -> str:
    return "\n".join(line.text for line in screen(tried_subject(result)))


def test_a_change_that_helps_is_proven_in_alternation() -> None:
    runs = Runs(lambda workers, _: 0.05 if workers else 0.1)
    result = runs.verify(finding(num_workers="4", persistent_workers="True"))
    with_change = [each.endswith("=4") for each in runs.asked]
    assert with_change == [False, False, True, True, False]
    assert len(runs.told) == 5
    assert result.verdict == "proven"
    assert result.gain is not None
    value, low, high = result.gain
    assert 0.2 < low < value < high
    assert value == pytest.approx(1.0, abs=0.1)
    assert result.changed_command == "python train.py --workers=4"
    assert result.left_out == {"persistent_workers": "True"}
    assert text(result).startswith("Proven: num_workers=4 is faster, speed +")
    assert AdviceVerification.from_json(result.to_json(), Path("x")) == result


def test_no_gain_and_worse_are_said() -> None:
    same = Runs(lambda *_: 0.1).verify(finding(num_workers="4"))
    assert same.verdict == "no gain"
    assert "detectable from" in text(same)
    assert text(same).startswith("No gain found by") and "--verify-runs" not in text(same)
    worse = Runs(lambda workers, _: 0.2 if workers else 0.1).verify(finding(num_workers="4"))
    assert worse.verdict == "worse"
    assert "keep the command as it is" in " ".join(text(worse).split())


def test_a_gain_that_is_no_larger_than_runs_differ_is_found_by_more_runs() -> None:
    seconds = (0.1, 0.085, 0.1, 0.09)
    few = iter((0.1, *seconds))
    result = Runs(lambda *_: next(few)).verify(finding(num_workers="4"))
    assert result.verdict == "no gain"
    assert text(result).startswith("Not decided: num_workers=4: speed ")
    assert "more runs find smaller gains: --verify-runs 9" in text(result)
    as_it_is, changed = itertools.cycle((0.11, 0.1)), itertools.cycle((0.09, 0.1))
    runs = Runs(lambda workers, _: next(changed if workers else as_it_is))
    more = runs.verify(finding(num_workers="4"), count=13)
    assert more.verdict == "proven"
    assert len(runs.asked) == 13 and runs.told[-1].startswith("run 13 of 13")
    assert [each.changed for each in more.runs] == 3 * [False, True, True, False]


def test_a_variable_can_always_be_set() -> None:
    runs = Runs(lambda _, variables: 0.05 if variables else 0.1)
    result = runs.verify(finding(OMP_NUM_THREADS="1"), command=("python", "train.py"))
    assert runs.asked[2] == "OMP_NUM_THREADS=1 python train.py"
    assert result.verdict == "proven"
    assert result.changed_command == "OMP_NUM_THREADS=1 python train.py"


def test_the_first_finding_that_can_be_applied_is_tried() -> None:
    runs = Runs(lambda *_: 0.1)
    result = runs.verify(
        finding(line="loader = ..."),
        finding(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
        finding(OMP_NUM_THREADS="2"),
        finding(num_workers="0"),
        finding(num_workers="3"),
        OMP_NUM_THREADS="2",
    )
    assert result.settings == {"num_workers": "3"}


@pytest.mark.parametrize(
    ("findings", "reason", "line"),
    [
        ((), "nothing to change was found", ""),
        ((finding(line="loss.detach()"),), "a change of the script", "loss.detach()"),
        (
            (finding(batch_size="8"),),
            "mark where its value stands: {batch_size:VALUE}",
            "batch_size=8",
        ),
        (
            (finding(PYTORCH_CUDA_ALLOC_CONF="x:1"),),
            "changes memory",
            "PYTORCH_CUDA_ALLOC_CONF=x:1",
        ),
    ],
)
def test_what_cannot_be_tried_is_said_with_the_line(
    findings: tuple[Finding, ...], reason: str, line: str
) -> None:
    runs = Runs(lambda *_: 0.1)
    result = runs.verify(*findings)
    assert (result.verdict, len(runs.asked), result.line) == ("not tried", 1, line)
    assert reason in result.reason
    assert AdviceVerification.from_json(result.to_json(), Path("x")) == result


def test_workers_that_stay_are_not_asked_for_without_workers() -> None:
    result = Runs(lambda *_: 0.1).verify(
        finding(num_workers="4", persistent_workers="True"),
        command=("python", "train.py", "--stay={persistent_workers:False}", "--workers=0"),
    )
    assert result.verdict == "not tried"


def test_switches_are_spelled_as_the_command_spells_them() -> None:
    filled = Filled(
        ("--pin={pin_memory:no}", "--stay={persistent_workers:false}", "{num_workers:0}")
    )
    assert filled.spelled("pin_memory", "True") == "yes"
    assert filled.spelled("persistent_workers", "True") == "true"
    assert filled.spelled("num_workers", "1") == "1"
    assert filled.fill({"num_workers": "1"}) == ["--pin=no", "--stay=false", "1"]


def test_a_change_that_the_script_does_not_take_over_ends_the_trial() -> None:
    runs = Runs(lambda *_: 0.1, loaders=(loader(num_workers=0),))
    result = runs.verify(finding(num_workers="4"))
    assert (result.verdict, len(runs.asked)) == ("not tried", 3)
    assert "still had 0 workers" in result.reason
    sets = Runs(lambda *_: 0.1, variables={"OMP_NUM_THREADS": "8"})
    ignored = sets.verify(finding(OMP_NUM_THREADS="1"), command=("env", "python"))
    assert "the command sets OMP_NUM_THREADS=8 itself" in ignored.reason


def test_runs_that_are_too_short_or_fail_with_the_change_tell_nothing() -> None:
    def judge(_: RunRecord) -> WatchResult:
        raise AssertionError("it is too short to be judged")

    short = verify(Filled(COMMAND), lambda *_: run(np.ones(20)), judge, lambda _: None, {})
    assert short.verdict == "cannot tell"
    assert "raise --verify-steps" in short.reason

    def fails(workers: int, _: Any) -> float:
        if workers:
            raise ShortRunError("it failed", 3)
        return 0.1

    result = Runs(fails).verify(finding(num_workers="4"))
    assert (result.verdict, result.reason) == ("cannot tell", "with the change, it failed")


# -- real processes ----------------------------------------------------------------------------

STUBBORN = """
import os, signal, struct, subprocess, sys, time
signal.signal(signal.SIGINT, lambda *_: print("asked", flush=True))
child = subprocess.Popen([sys.executable, "-c", "import signal, time;"
    "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"])
open("child", "w").write(str(child.pid))
folder = os.environ["TRAINFIT_WATCH"]
open(folder + "/rank0.steps.bin", "wb").write(bytes(int(sys.argv[1]) * 400))
time.sleep(60)
"""


def test_a_run_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainfit.watch.verify.PATIENCE_S", 0.5)
    (tmp_path / "s.py").write_text(STUBBORN)
    made = short_run([sys.executable, "s.py", "50"], {"A": "1"}, tmp_path / "run", 40)
    assert made.header.ending == "interrupted"
    assert "asked" in capfd.readouterr().out
    child = int((tmp_path / "child").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(50):
            os.kill(child, 0)
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                raise ProcessLookupError
            time.sleep(0.1)


def test_a_run_that_fails_says_so(tmp_path: Path) -> None:
    with pytest.raises(ShortRunError, match="failed with exit code 3") as caught:
        short_run([sys.executable, "-c", "raise SystemExit(3)"], {}, tmp_path / "run", 40)
    assert caught.value.exit_code == 3


TRAIN = """
import sys, time, torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(4), torch.ones(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=int(sys.argv[1]))
for _ in range(10):
    for x, y in loader:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_verify_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    words = ["watch", "--verify", "--verify-steps", "60", "--json", "--folder", tmp_path / "runs"]
    done = trainfit(*words, "--", sys.executable, "train.py", "{num_workers:0}", cwd=tmp_path)
    document = json_of(done)
    assert "the command is run 5 times as it is" in done.stderr
    assert document["verdict"] == "proven", (document, done.stderr)
    assert int(document["settings"]["num_workers"]) > 0
    assert shlex.split(document["changed_command"])[-1] == document["settings"]["num_workers"]
    assert [each["changed"] for each in document["runs"]] == [False, True, True, False]
    assert sorted(each.name for each in (tmp_path / "runs").iterdir()) == [
        f"run{at}" for at in range(1, 6)
    ]


def test_bad_options_of_verify(tmp_path: Path) -> None:
    none = trainfit("watch", "--verify", cwd=tmp_path)
    few = trainfit("watch", "--verify", "--verify-steps", "9", "--", "true", cwd=tmp_path)
    odd = trainfit("watch", "--verify", "--verify-runs", "6", "--", "true", cwd=tmp_path)
    alone = trainfit("watch", "--verify-runs", "9", "--", "true", cwd=tmp_path)
    typo = trainfit("watch", "--verify", "--", "x", "{num_worker:4}", cwd=tmp_path)
    assert [each.returncode for each in (none, few, odd, alone, typo)] == 5 * [2]
    assert "give 40 or more" in error_line(few)
    assert "expected 5, 9, 13, … runs, got '6'" in odd.stderr
    assert "did you mean {num_workers:…}" in error_line(typo)


def test_tracebacks_of_our_own_interrupt_are_not_passed_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    seen = ""
    with _Errors() as errors:
        theirs = os.dup(errors.descriptor)
        errors.begin()
        os.write(theirs, b"a warning\n")
        deadline = time.monotonic() + 300
        while "a warning" not in seen:
            assert time.monotonic() < deadline
            seen += capfd.readouterr().err
        errors.mute()
        os.write(theirs, b"Traceback (most recent call last):\nKeyboardInterrupt\n")
        os.close(theirs)
    assert "Traceback" not in seen + capfd.readouterr().err
