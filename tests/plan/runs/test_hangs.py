"""A run that hangs before its first step: why, by the stacks of its workers and what they print."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest

from tests.helpers_cli import trainfit
from trainfit.plan.runs.failures import cause_of
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.runs.trace import LoaderInfo, TraceOutcome
from trainfit.scripts.fault import HangStacks

LOADER = LoaderInfo(0, 4, 100, 0, LoaderSettings(2), "Data", "train.py:9")
SCRIPT = """
import threading, time, torch
from torch.utils.data import DataLoader, Dataset

lock = threading.Lock()

class Data(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        with lock:
            return torch.rand(8)

def hold():
    with lock:
        time.sleep(1000)

if __name__ == "__main__":
    threading.Thread(target=hold, daemon=True).start()
    time.sleep(0.2)
    model = torch.nn.Linear(8, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(Data(), 4, num_workers=1):
        model(x.cuda()).sum().backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_a_lock_that_was_held_at_the_fork_is_told(tmp_path: Path) -> None:
    """That no step was made, and to raise the time limit, was all that was said."""
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("--no-loader", "--no-remedies", "--time-limit", "30", "--", "python", "train.py")
    done = trainfit("plan", "--gpu", "T4", *words, cwd=tmp_path)
    assert done.returncode != 0
    assert "cause: Workers wait for a lock and make no progress" in done.stderr
    assert "forkserver" in done.stderr


def wait(lock: threading.Lock, begun: object) -> None:
    begun.set()  # type: ignore[attr-defined]
    with lock:
        pass


def test_stacks_of_a_process_and_its_fork(tmp_path: Path) -> None:
    stacks = HangStacks(tmp_path / "stacks.txt")
    context, lock = multiprocessing.get_context("fork"), threading.Lock()
    begun = context.Event()
    lock.acquire()
    child = context.Process(target=wait, args=(lock, begun), daemon=True)
    child.start()
    begun.wait()
    text = stacks.text()
    child.kill()
    child.join()
    assert text.count("in wait") >= 1 and "test_stacks_of_a_process_and_its_fork" in text


@pytest.mark.parametrize(
    ("output", "loader", "kind"),
    [
        ("OSError: [Errno 24] Too many open files", LOADER, "open_files"),
        # A run that could not even say what it was doing.
        ("OSError: [Errno 24] Too many open files", None, "open_files"),
        ("RuntimeError: DataLoader worker is out of shared memory", LOADER, "shm_full"),
        ("loading the data set …", LOADER, None),  # slow, for all that is known
        ("", None, None),
    ],
)
def test_what_its_processes_printed(
    output: str, loader: LoaderInfo | None, kind: str | None
) -> None:
    outcome = TraceOutcome("timeout", seconds=60.0, loader=loader)
    found = cause_of(outcome, output)
    assert (found.kind if found is not None else None) == kind
    # Where steps were made, it was not hanging before them.
    assert cause_of(TraceOutcome("timeout", steps=2, loader=loader), output) is None
