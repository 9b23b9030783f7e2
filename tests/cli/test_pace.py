"""``trainfit pace`` as users call it, on this machine."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers_cli import called_here, environment, error_line, trainfit
from trainfit.hardware.machine.system import System
from trainfit.results.pace import PaceResult

POLICY = """
import time
calls = 0

def act():
    total = 0
    for number in range(20000):
        total += number
    return total

def load():
    return 20000

def with_model(model):
    return sum(range(model))

def fails():
    global calls
    calls += 1
    if calls == 40:
        raise RuntimeError("the arm is gone")

def forward(model):
    print("rehearsed", model)

thing = 3

def slow():
    time.sleep(0.05)

def chunk():
    global calls
    calls += 1
    if calls % 20 == 1:
        time.sleep(0.01)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "policy.py").write_text(POLICY)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    return tmp_path


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call imports in this process does not stay."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def paced_here(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """In this process, which has imported what one of its own would: with ``imports``."""
    return called_here(["pace", *words], cwd)


def test_a_callable(folder: Path, imports: None) -> None:
    done = paced_here(
        "policy.py:act", "--hz", "50,100", "--duration", "1s", "--output", "pace.json",
        "--no-attribution", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "policy.py:act at 50, 100 Hz" in done.stdout
    assert "back to back" in done.stdout and "Missed" in done.stdout
    found = PaceResult.load(folder / "pace.json")
    assert {rate.hz for rate in found.rates} == {50.0, 100.0}
    assert all(rate.calls.count > 20 for rate in found.rates)
    assert found.back_to_back is not None and found.back_to_back.speed is not None
    shown = trainfit("show", "pace.json", cwd=folder)
    assert shown.returncode == 0 and shown.stdout == done.stdout


@pytest.mark.slow
def test_what_a_setup_returns_is_the_argument(folder: Path, imports: None) -> None:
    done = paced_here(
        "policy.py:with_model", "--setup", "policy.py:load", "--hz", "100",
        "--duration", "500ms", "--json", "--no-attribution", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = PaceResult.from_json(done.stdout, Path("stdout"))
    assert found.rates[0].calls.p50 > 50e-6


@pytest.mark.slow
def test_a_rehearsal_gets_the_callables_argument(folder: Path, imports: None) -> None:
    done = paced_here(
        "policy.py:with_model", "--setup", "policy.py:load", "--hz", "100",
        "--duration", "500ms", "--rehearse", "policy.py:forward", "--fix", "rehearse",
        "--no-attribution", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rehearsed 20000\n" in done.stdout
    assert re.search(r"\n +fix +--fix rehearse: a rehearsal call right before", done.stdout)


@pytest.mark.slow
def test_a_command_that_answers_line_by_line(folder: Path, imports: None) -> None:
    (folder / "server.py").write_text(
        "import sys\nfor line in sys.stdin:\n    sum(range(20000))\n    print('done', flush=True)\n"
    )
    done = paced_here(
        "--hz", "100", "--duration", "1", "--json", "--no-attribution", "--",
        sys.executable, "server.py", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = PaceResult.from_json(done.stdout, Path("stdout"))
    assert found.target.endswith("server.py")
    (rate,) = found.rates
    assert 0 < rate.cpu_s < rate.calls.p50
    assert rate.speed is None  # it ran on another core


def test_a_call_that_raises_keeps_what_was_measured(folder: Path, imports: None) -> None:
    done = paced_here(
        "policy.py:fails", "--hz", "50", "--duration", "5", "--output", "pace.json",
        cwd=folder,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Call 40 raised RuntimeError: the arm is gone" in done.stdout
    assert PaceResult.load(folder / "pace.json").failure is not None


def test_a_rate_that_cannot_be_reached(folder: Path, imports: None) -> None:
    done = paced_here(
        "policy.py:slow", "--hz", "40", "--duration", "1", "--no-attribution", cwd=folder
    )
    assert done.returncode == 1
    assert done.stdout.startswith("40 Hz cannot be held: a call needs ")
    assert "as fast as back to back" not in done.stdout
    assert re.search(r"40 Hz cannot be held: a call needs [\d.]+ ms", done.stdout)


@pytest.mark.slow
def test_each_rate_of_a_chunked_policy_has_its_row_or_the_reason(
    folder: Path, imports: None
) -> None:
    done = paced_here(
        "policy.py:chunk", "--hz", "50,2", "--duration", "1", "--no-attribution",
        "--output", "pace.json", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "trainfit: 50 Hz: every 20th call does the work" in done.stderr
    assert "trainfit: 2 Hz: every 20th call does the work, every 10 s" in done.stderr
    assert "\n  50 Hz " in done.stdout and re.search(r"\n  2 Hz +was not measured: ", done.stdout)
    found = PaceResult.load(folder / "pace.json")
    assert [rate.hz for rate in found.rates] == [50.0]
    assert [each.hz for each in found.unmeasured] == [2.0]
    nothing = paced_here(
        "policy.py:chunk", "--hz", "2", "--duration", "1", "--no-attribution", cwd=folder
    )
    assert nothing.returncode == 2
    assert nothing.stdout.startswith("Nothing was measured: give --duration 52.\n")


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_measured(folder: Path) -> None:
    words = [sys.executable, "-m", "trainfit", "pace", "policy.py:act", "--hz", "50"]
    process = subprocess.Popen(
        [*words, "--duration", "60", "--output", "pace.json"],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Who runs the tests in the background ignores Ctrl-C, which children inherit.
    )  # fmt: skip
    until = time.monotonic() + 300
    assert process.stderr is not None
    while "Hz" not in (line := process.stderr.readline()) and time.monotonic() < until:
        assert line or process.poll() is None
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Interrupted: results so far" in output
    assert PaceResult.load(folder / "pace.json").ended == "interrupted"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("policy.py:absent", "policy.py has no 'absent'; it has "),
        ("policy.py:thing", "'policy.py:thing' is of type int, which cannot be called"),
        ("absent.py:act", "there is no file 'absent.py'; check the path"),
        ("absent:act", "there is no module 'absent'"),
        ("policy", "write MODULE:CALLABLE or path/to/file.py:CALLABLE, as in policy.py:act"),
        (
            "policy.py:act --setup policy.py:thing",
            "--setup 'policy.py:thing' is of type int, which cannot be called",
        ),
        ("policy.py:act --output absent/x.json", "its folder does not exist"),
        ("policy.py:act --undo", "--undo restores what --fix governor changed"),
        ("policy.py:act -- cat", "give either a callable or a command, not both"),
        ("--setup policy.py:load -- cat", "--setup is for a callable"),
        ("--rehearse policy.py:act -- cat", "--rehearse is for a callable"),
        (
            "policy.py:act --rehearse policy.py:thing",
            "--rehearse 'policy.py:thing' is of type int, which cannot be called",
        ),
        ("policy.py:act --rehearse policy.py:forward", "--rehearse 'policy.py:forward'"),
        ("-- absent-command", "command 'absent-command': No such file or directory"),
        ("", "nothing to call: name a callable"),
        ("-- true", "Call 1 raised CalleeError: command 'true' ended with exit code 0"),
        ("broken.py:act", "could not be imported at "),
    ],
)
def test_bad_input(folder: Path, imports: None, words: str, said: str) -> None:
    done = called_here(["pace", *words.split()], folder)
    assert done.returncode == 2, done.stdout
    assert said in (done.stdout if "Call 1" in said else error_line(done))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--hz 0", "expected up to 8 rates above 0 and up to"),
        ("--hz fast", "such as 15,30,60, got 'fast'"),
        ("--duration 0", "expected a time above 0 and up to an hour"),
        ("--fix magic", "invalid choice: 'magic'"),
    ],
)
def test_bad_options(folder: Path, words: str, said: str) -> None:
    done = called_here(["pace", "policy.py:act", *words.split()], folder)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr


def test_nothing_to_undo(folder: Path) -> None:
    done = called_here(["pace", "--undo"], folder, XDG_STATE_HOME=str(folder))
    assert done.returncode == 0 and "nothing to undo" in done.stdout


def test_ticks_of_a_users_loop(folder: Path) -> None:
    (folder / "loop.py").write_text(
        "import time, trainfit\n"
        "for turn in range(40):\n"
        "    with trainfit.pace.tick(100, name='arm\\x1b'):\n"
        "        time.sleep(0.002)\n"
        "    time.sleep(0.008)\n"
        "assert len(trainfit.pace.seen()) == 1\n"
        "with trainfit.pace.tick('fast'):\n"
        "    pass\n"
        "try:\n"
        "    with trainfit.pace.tick(100, name='arm\\x1b'):\n"
        "        raise KeyError('mine')\n"
        "except KeyError:\n"
        "    print('came through')\n"
    )
    done = subprocess.run(
        [sys.executable, "loop.py"], cwd=folder, capture_output=True, text=True,
        env=environment(TRAINFIT_PACE_OUTPUT="seen.json"),
    )  # fmt: skip
    assert done.returncode == 0 and "came through" in done.stdout, done.stderr
    assert "trainfit: arm? at 100 Hz:" in done.stderr and "\x1b" not in done.stderr
    (rate,) = PaceResult.load(folder / "seen.json").rates
    assert rate.calls.count == 36 and rate.calls.p50 >= 0.002


@pytest.mark.slow
def test_the_python_function(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainfit as package

    asked: list[str] = []
    probe = System.probe
    monkeypatch.setattr(System, "probe", lambda *words: (asked.append(words[1]), probe(*words))[1])
    found = package.pace(lambda: sum(range(5000)), hz=[200], seconds=0.5)
    assert isinstance(found, PaceResult) and found.rates[0].hz == 200
    # What no figure of it needs is not asked: PyTorch is imported for it, in another process.
    assert asked and "torch_devices" not in asked
    with pytest.raises(ValueError, match="above 0"):
        package.pace(print, hz=[])
