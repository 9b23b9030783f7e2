"""Scripts that fail: every verb that runs one says cause and fix below the error."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from helpers_cli import error_line, json_of, trainfit
from trainfit.cli.main import _report
from trainfit.plan.runs.failures import ScriptError
from trainfit.results.findings import Place, failure_finding
from trainfit.results.watch import WatchResult

#: Loads from a handle as lmdb's: whoever wants to pickle it is refused.
SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, Dataset

class Environment:
    def __reduce__(self):
        raise TypeError("cannot pickle 'Environment' object")

class Rows(Dataset):
    def __init__(self):
        self.env = Environment()
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.zeros(4)

def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = torch.nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for batch in DataLoader(Rows(), 8, num_workers=1, multiprocessing_context="spawn"):
        net(batch.to(device)).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    main()
"""
CAUSE = "cannot be pickled for workers that are not forked"
FIX = "trainfit: fix: open it in the worker"


@pytest.mark.usefixtures("warm_measuring")
@pytest.mark.parametrize(
    "verb",
    [
        ("plan", "--no-loader", "--gpu", "T4", "--", "python"),
        ("simulate", "--gpu", "T4"),
        ("loader", "--step-time", "5ms", "--", "python"),
        ("rehearse", "--step-time", "5ms", "--duration", "1", "--", "python"),
    ],
    ids=lambda verb: verb[0],
)
def test_a_script_that_cannot_start_its_workers(verb: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = trainfit(*verb, "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "TypeError: cannot pickle 'Environment' object" in done.stderr
    cause, fix = (
        line for line in done.stderr.splitlines() if line.startswith(("trainfit: cau", FIX))
    )
    assert CAUSE in cause and "__getitem__" in fix and "fork" not in fix
    # Below the error, above what the script printed.
    order = [done.stderr.index(each) for each in ("trainfit: error", cause, fix, "--- the script")]
    assert order == sorted(order)


def watched(folder: Path, script: str, *words: str) -> tuple[WatchResult, str]:
    (folder / "train.py").write_text(script)
    command = ["watch", "--quiet", "--output", "r.json", "--", sys.executable, "train.py", *words]
    done = trainfit(*command, cwd=folder, XDG_STATE_HOME=str(folder / "state"))
    assert done.returncode == 1, done.stderr
    return WatchResult.load(folder / "r.json"), done.stderr


def test_watch_says_first_why_a_run_did_not_begin(tmp_path: Path) -> None:
    result, printed = watched(tmp_path, SCRIPT)
    assert result.findings[0].kind == "not_picklable"
    assert "open it in the worker" in result.findings[0].fix.action
    assert f"collate_fn or worker_init_fn {CAUSE}" in " ".join(printed.split())


KEEPS = """
import resource, sys, torch
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        return torch.zeros(4), index % 2

def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    kept = []
    for batch, labels in DataLoader(Rows(), 4, num_workers=1):
        optimizer.zero_grad()
        net(batch).sum().backward()
        optimizer.step()
        kept.append(labels)

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_watch_names_too_many_open_files_with_all_its_fixes(tmp_path: Path) -> None:
    result, printed = watched(tmp_path, KEEPS)
    first = result.findings[0]
    assert (first.kind, first.severity) == ("open_files", "critical")
    words = " ".join(printed.split())
    assert "The run failed: Too many open files" in words
    for fix in ("ulimit -n 65536", 'set_sharing_strategy("file_system")', "clone what it keeps"):
        assert fix in words
    assert result.next_command.startswith("trainfit watch -- ")


UNGUARDED = """
import torch
from torch.utils.data import DataLoader, TensorDataset
device = "cuda" if torch.cuda.is_available() else "cpu"
net = torch.nn.Linear(4, 2).to(device)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
data = TensorDataset(torch.zeros(64, 4))
for (x,) in DataLoader(data, 8, num_workers=1, multiprocessing_context="spawn"):
    net(x.to(device)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_script_without_main_guard(tmp_path: Path) -> None:
    result, _ = watched(tmp_path, UNGUARDED)
    assert result.findings[0].kind == "no_main_guard"


@pytest.mark.slow
def test_plan_tells_of_a_missing_main_guard(tmp_path: Path) -> None:
    """By what the worker printed."""
    (tmp_path / "train.py").write_text(UNGUARDED)
    words = ("plan", "--no-loader", "--gpu", "T4", "--", "python", "train.py")
    done = trainfit(*words, cwd=tmp_path)
    assert "trainfit: cause: Spawned workers import the script" in done.stderr


def test_a_causes_own_line_is_told_where_the_error_names_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cause = dataclasses.replace(failure_finding("a", "A", "", "b"), place=Place("src/set.py", 14))
    for said, told in (("train.py:27", True), ("src/set.py:14 (A)", False), ("set.py:143", True)):
        assert _report(ScriptError(f"failed at {said}", cause=cause)) == 2
        assert ("trainfit: line: src/set.py:14\n" in capsys.readouterr().err) is told


PORT = """
import os, socket, torch
with socket.socket() as taken:
    taken.bind(("0.0.0.0", 0))
    taken.listen()
    port = str(taken.getsockname()[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.distributed.init_process_group("gloo")
"""


@pytest.mark.slow
def test_watch_tells_of_a_failure_before_any_training(tmp_path: Path) -> None:
    result, printed = watched(tmp_path, PORT)
    assert result.findings[0].kind == "port_in_use"
    assert "--standalone" in result.findings[0].fix.action
    assert not result.steps and "nothing was recorded" not in printed


HALVES = """
import sys, torch
device = "cuda" if torch.cuda.is_available() else "cpu"
net = torch.nn.Linear(4, 2).to(device)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(6):
    x = torch.zeros(8, 4, device=device)
    if step == 4:
        x = eval(sys.argv[1])
    net(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_failure_after_some_steps(tmp_path: Path) -> None:
    result, _ = watched(tmp_path, HALVES, "x.half()")
    assert result.findings[0].kind == "mixed_dtypes"
    assert result.findings[0].last_step == 4
    done = trainfit(
        "simulate", "--gpu", "T4", "--steps", "6", "--json", "train.py", "x.half()", cwd=tmp_path
    )
    assert json_of(done)["steps"] == 4
    assert "mixed precision is only partly on" in done.stderr and "autocast" in done.stderr


@pytest.mark.slow
def test_an_unknown_error_is_told_and_not_explained(tmp_path: Path) -> None:
    result, printed = watched(tmp_path, HALVES, "{}['no']")
    (failed,) = (each for each in result.findings if each.severity == "critical")
    assert (failed.kind, failed.title) == ("script_error", "KeyError: 'no'")
    assert failed.place is not None and "train.py:9" in failed.cause
    assert printed.splitlines()[0].startswith("The run failed: KeyError: 'no'")
    done = trainfit("simulate", "--gpu", "T4", "--steps", "6", "train.py", "{}['no']", cwd=tmp_path)
    assert "KeyError: 'no'" in error_line(done) and "trainfit: cause" not in done.stderr
