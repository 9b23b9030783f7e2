"""Whole runs, as the verbs make them: the user's files are what they were."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

import pytest

from helpers_cli import error_line, json_of, trainfit
from helpers_sandbox import tree
from trainfit.hardware import find_gpu
from trainfit.plan.command.parsing import Command, parse_command
from trainfit.plan.runs.failures import shortfall
from trainfit.plan.runs.processes import WarmProcesses
from trainfit.plan.runs.tracing import ProtectionError, Tracer
from trainfit.results.plan import PlanResult
from trainfit.results.runs.script import SandboxRequest
from trainfit.results.runs.trace import TraceOutcome
from trainfit.scripts.sandbox import hint

#: As many scripts do: a folder by the second, a log, the newest weights over the last ones.
TRAIN = """
import os, shutil, sys, time
import torch
run = f"runs/{int(time.time()) // 1000}"
os.makedirs(run)
shutil.rmtree("old")
model = torch.nn.Linear(64, 64).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    model(torch.ones(int(sys.argv[1]), 64, device="cuda")).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), "last.pt")
    assert torch.load("last.pt")["weight"].shape == (64, 64)
    with open(f"{run}/log.txt", "a") as stream:
        stream.write(f"{step}\\n")
    MORE
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "old").mkdir(parents=True)
    (folder / "old" / "log.txt").write_text("an old run")
    (folder / "last.pt").write_bytes(b"the user's trained weights")
    (folder / "train.py").write_text(TRAIN.replace("MORE", "pass"))
    return folder


def command_in(work: Path, request: SandboxRequest) -> Command:
    command = parse_command(["python", str(work / "train.py"), "8"])
    return dataclasses.replace(command, sandbox=request)


def traced(work: Path, request: SandboxRequest, *, warm: bool = False) -> TraceOutcome:
    command, gpu = command_in(work, request), find_gpu("RTX 4090")
    with WarmProcesses() as processes:
        forks_from = processes if warm else None
        with Tracer(command, gpu, steps=3, warm=forks_from) as tracer:
            return tracer.trace().outcome


@pytest.mark.parametrize("runs", ["brief", pytest.param("all of a plan's", marks=pytest.mark.slow)])
def test_plan_changes_nothing(
    work: Path, runs: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(work)
    words = ["--gpu", "RTX 4090", "--steps", "2", "--json", "--", "python", "train.py"]
    temporary = work.with_name("temporary")
    temporary.mkdir()
    of_its_process = {"TMPDIR": str(temporary)}
    if runs == "brief":  # in this process
        request.getfixturevalue(runs)
        monkeypatch.setattr(tempfile, "tempdir", of_its_process.pop("TMPDIR"))
    done = trainfit("plan", *words, "{batch_size:8}", cwd=work, **of_its_process)
    assert done.returncode == 0, done.stderr
    assert tree(work) == before
    assert not [*temporary.glob("tmp*")]  # PyTorch's folder for compiled code is every process's
    protection = json_of(done)["protection"]
    assert protection["kind"] in ("overlay", "redirection")
    # last.pt and the log; the old run's log is removed.
    assert (protection["files"], protection["removed"]) == (2, 1)
    result = PlanResult.from_json(done.stdout, Path("plan"))
    assert result.protection is not None and not result.protection.stopped


def test_simulate_shows_what_would_have_been_written(work: Path) -> None:
    before = tree(work)
    words = ["--gpu", "RTX 4090", "--steps", "2", "--keep-writes", "../kept"]
    done = trainfit("simulate", *words, "--output", "../r.tf", "train.py", "8", cwd=work)
    assert done.returncode == 0, done.stderr
    assert tree(work) == before
    kept = Path(f"{work.parent}/kept{work}")
    assert (kept / "last.pt").stat().st_size > 16384
    (log,) = kept.glob("runs/*/log.txt")
    assert log.read_text() == "0\n"  # it was stopped within its second step
    assert "your files were not changed" in " ".join(done.stdout.split())


# Of processes of their own test_files.py says it, kind by kind of file.
@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    "forks", [pytest.param(False, marks=pytest.mark.slow, id="own process"),
              pytest.param(True, id="forked")],
)  # fmt: skip
def test_where_no_overlay_can_be_had(
    forks: bool, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    before = tree(work)
    outcome = traced(work, SandboxRequest(kinds=("redirection",)), warm=forks)
    assert (outcome.status, outcome.steps) == ("finished", 3), outcome
    assert tree(work) == before
    assert outcome.protection is not None and outcome.protection.kind == "redirection"
    assert (outcome.protection.files, outcome.protection.removed) == (2, 1)


@pytest.mark.usefixtures("warm")
def test_what_was_measured_before_too_much_was_written(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    more = "\n    while step == 1: open('big', 'ab').write(bytes(1 << 20)); time.sleep(0.01)"
    (work / "train.py").write_text(TRAIN.replace("MORE", more.strip()))
    before = tree(work)
    request = SandboxRequest(limit_bytes=20_000_000)
    command = command_in(work, request)
    with Tracer(command, find_gpu("RTX 4090"), steps=3) as tracer:
        trace = tracer.trace()
    assert (trace.outcome.status, trace.outcome.steps) == ("failed", 2)
    said = shortfall(trace, command)
    assert said is not None and "wrote more than 0.02 GB" in said and "--allow-writes" in said
    assert trace.recording is not None and trace.recording.steps == 2
    assert tree(work) == before


def test_without_any_protection_nothing_is_run(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    before = tree(work)
    with pytest.raises(ProtectionError, match="--allow-writes"):
        traced(work, SandboxRequest(kinds=()))
    assert tree(work) == before


@pytest.mark.parametrize(
    ("verb", "folder", "says"),
    [
        ("plan", "old", "'old' is not empty"),
        ("simulate", "last.pt", "'last.pt' is a file"),
        ("loader", "no/where", "is not writable"),
        ("rehearse", "old", "'old' is not empty"),
    ],
)
def test_bad_folders_to_keep_writes_in(verb: str, folder: str, says: str, work: Path) -> None:
    more = ["--step-time", "1ms"] if verb in ("loader", "rehearse") else ["--gpu", "RTX 4090"]
    words = [*more, "--keep-writes", folder, "--", "python", "train.py", "8"]
    done = trainfit(verb, *words, cwd=work)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in error_line(done)


def test_writes_are_allowed_or_kept(work: Path) -> None:
    words = ["--allow-writes", "--keep-writes", "x", "--", "python", "train.py", "8"]
    done = trainfit("plan", "--gpu", "RTX 4090", *words, cwd=work)
    assert done.returncode == 2 and "not allowed with" in done.stderr
    assert not os.path.exists(work / "x")


def test_what_a_sandboxed_script_cannot_do() -> None:
    asked = EOFError("EOF when reading a line")
    assert "reads from standard input" in hint(asked)
    assert hint(ValueError("x")) == hint(OSError(28, "No space left on device")) == ""


def test_a_script_that_removes_its_working_folder(work: Path) -> None:
    """It fails as it would; its folder is there afterwards."""
    lines = ("import os, shutil, torch", "shutil.rmtree(os.getcwd())", "open('x')")
    (work / "train.py").write_text("\n".join(lines))
    before = tree(work)
    done = trainfit("plan", "--gpu", "RTX 4090", "--", "python", "train.py", cwd=work)
    assert done.returncode == 2
    assert "the script failed at train.py:3 (FileNotFoundError" in error_line(done)
    assert tree(work) == before
