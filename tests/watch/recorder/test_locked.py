"""Stacks of a process whose interpreter's lock is kept by code in C."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainfit.findings.tracebacks import parse_stacks
from trainfit.results.runs.locked_stacks import locked_path, stacks_of_locked
from trainfit.simgpu.patching import PatchSet
from trainfit.watch.recorder.looks import locked, main_thread
from trainfit.watch.recorder.looks.locked import LockedStack
from trainfit.watch.recorder.looks.main_thread import MainThreadLooks


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(locked, "_WRITTEN_S", 0.1)
    monkeypatch.setattr(locked, "_PUT_OFF_S", 0.0)
    patches = PatchSet()
    locked.install(patches)
    yield
    patches.restore()
    faulthandler.cancel_dump_traceback_later()
    locked._wanted_by_script, locked._armed = True, None


def keep_the_lock(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def test_stacks_are_told_once_the_lock_is_let_go(tmp_path: Path) -> None:
    told: list[str] = []
    stack = LockedStack(tmp_path / "rank0.locked.1", lambda text, *_: told.append(text))
    stack.put_off()
    keep_the_lock(0.6)
    assert "keep_the_lock" in (tmp_path / "rank0.locked.1").read_text()
    stack.put_off()
    (only,) = told
    first = parse_stacks(only)[0]
    assert first.frames[0].function == "keep_the_lock"
    assert first.frames[-1].function != "_bootstrap"
    stack.put_off()  # and taken back
    stack.close()
    assert len(told) == 1 and not list(tmp_path.iterdir())


def test_a_process_that_ends_meanwhile_tells_at_its_end(tmp_path: Path) -> None:
    told: list[str] = []
    stack = LockedStack(tmp_path / "rank0.locked.1", lambda text, *_: told.append(text))
    stack.put_off()
    keep_the_lock(0.6)
    stack.close()
    assert len(told) == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("went_on", "told"), [(True, 0), (False, 1)])
def test_stacks_from_before_the_last_step_are_no_standstill(
    tmp_path: Path, went_on: bool, told: int
) -> None:
    """No thread of the recorder had a core for so long, and the training went on meanwhile."""
    events: list[str] = []
    phases = SimpleNamespace(since=time.monotonic(), current=0)
    training: Any = SimpleNamespace(count=50, light=False, phases=phases, thread=None)
    looks = MainThreadLooks(
        training, tmp_path / "rank0", lambda kind, **_: events.append(kind), lambda: None
    )
    looks._locked.put_off()
    keep_the_lock(0.6)
    if went_on:
        phases.since = time.monotonic() + 1.0  # whatever the clocks' resolution is
    looks._locked.close()
    assert events == ["standstill"] * told


def test_nothing_is_written_while_threads_run(tmp_path: Path) -> None:
    stack = LockedStack(tmp_path / "rank0.locked.1")
    for _ in range(20):
        stack.put_off()
        time.sleep(0.02)  # the lock is free
    stack.put_away()
    assert (tmp_path / "rank0.locked.1").read_text() == ""


def test_a_child_that_is_forked_does_not_wait_for_a_thread_that_it_lacks(tmp_path: Path) -> None:
    stack = LockedStack(tmp_path / "rank0.locked.1")
    stack.put_off()
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends it
        faulthandler.cancel_dump_traceback_later()  # as Python's end does
        stack.put_off()
        stack.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (tmp_path / "rank0.locked.1").exists()  # the parent's
    stack.put_off()
    assert locked._armed is stack
    stack.close()


def test_a_timer_of_the_script_stays(tmp_path: Path) -> None:
    stack = LockedStack(tmp_path / "rank0.locked.1")
    with (tmp_path / "own.txt").open("w") as own:
        faulthandler.dump_traceback_later(0.2, file=own)
        stack.put_off()
        stack.close()
        time.sleep(0.6)
    assert "test_a_timer_of_the_script_stays" in (tmp_path / "own.txt").read_text()
    assert not (tmp_path / "rank0.locked.1").exists()


def test_a_file_of_the_script_that_has_got_the_number_is_left_alone(tmp_path: Path) -> None:
    stack = LockedStack(tmp_path / "rank0.locked.1")
    stack.put_off()
    stack.put_away()
    theirs = tmp_path / "theirs.txt"
    with theirs.open("w") as file:
        os.dup2(file.fileno(), stack._file.fileno())
        stack.put_off()
        keep_the_lock(0.4)
        stack.close()
    assert theirs.read_text() == ""


def test_threads_of_the_recorder_are_left_out(tmp_path: Path) -> None:
    text = (
        "Timeout (0:00:10)!\nThread 0x01 (most recent call first):\n"
        '  File "/x/trainfit/watch/recorder/looks/main_thread.py", line 9 in _run\n\n'
        "Thread 0x02 (most recent call first):\n"
        '  File "/x/data.py", line 5 in fill\n  File "/p/threading.py", line 9 in _bootstrap\n\n'
        "Thread 0x03 (most recent call first):\n"
        '  File "/x/train.py", line 7 in <module>\n'
    )
    stacks = stacks_of_locked(text)
    assert [each.frames[0].line for each in parse_stacks(stacks)] == [7, 5]
    assert stacks_of_locked("") == ""
    # Python takes itself apart: that is slow where much was imported, and no standstill.
    over = "Timeout (0:00:10)!\nThread 0x00007fb623071b80 (most recent call first):\n"
    assert stacks_of_locked(f"{over}  <no Python frame>\n") == ""
    assert locked_path(tmp_path / "rank0", 5).name == "rank0.locked.5"


@pytest.mark.parametrize("fails", [3, 10**6])
def test_a_look_that_fails_is_not_the_last_one_and_leaves_no_timer(
    tmp_path: Path, fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer that nobody puts off writes the stacks of a process that runs, which can crash it."""
    monkeypatch.setattr(locked, "_WRITTEN_S", 1000.0)
    training: Any = SimpleNamespace(count=50, light=False, phases=SimpleNamespace(), thread=None)
    looks = MainThreadLooks(training, tmp_path / "rank0", lambda kind, **_: None, lambda: None)
    monkeypatch.setattr(main_thread.MainThreadLooks, "_pause", lambda _: 0.001)
    made, seen = [], threading.Event()

    def look(_: Any, now: float) -> None:
        made.append(now)
        if len(made) <= fails:
            raise TypeError("unhashable type: 'list'")
        seen.set()

    monkeypatch.setattr(main_thread.MainThreadLooks, "look", look)
    monkeypatch.setattr(main_thread.MainThreadLooks, "look_around", lambda *_: None)
    looks.start()
    if fails < 20:
        assert seen.wait(30)
        looks.stop()
    looks._thread.join(30)
    assert locked._armed is None and len(made) >= min(fails, 20)
