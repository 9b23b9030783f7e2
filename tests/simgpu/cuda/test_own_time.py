"""Time that others' work on the machine does not lengthen."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainfit.scripts.execute import watch
from trainfit.simgpu import cuda_clocks
from trainfit.simgpu.cuda_clocks import LONGEST, OwnTime, stopwatch


class _Machine:
    """Clocks that a test sets: what passes, what this process has cores for, and what it waits."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.passed_s = self.cores_s = 0.0
        patch.setattr(time, "monotonic", lambda: self.passed_s)
        patch.setattr(time, "process_time", lambda: self.cores_s)
        patch.setattr(cuda_clocks, "_THREADS", folder)
        self._folder = folder

    def waited(self, thread: int, seconds: float) -> None:
        (self._folder / str(thread)).mkdir(exist_ok=True)
        (self._folder / str(thread) / "schedstat").write_text(f"5 {round(seconds * 1e9)} 7\n")


@pytest.fixture(autouse=True)
def no_last_resort() -> Iterator[None]:
    """``watch`` would end this process."""
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Machine:
    return _Machine(monkeypatch, tmp_path)


def test_waiting_for_a_core_does_not_count(machine: _Machine) -> None:
    machine.waited(1, 3.0)
    own = OwnTime()
    machine.passed_s, machine.cores_s = 100.0, 20.0
    machine.waited(1, 73.0)
    assert own() == pytest.approx(30.0)  # 20 on a core, 10 of waiting for something else


def test_what_ran_counts_however_many_threads_waited(machine: _Machine) -> None:
    own = OwnTime()
    machine.passed_s, machine.cores_s = 100.0, 40.0
    for thread in range(8):
        machine.waited(thread, 60.0)
    assert own() == 40.0


def test_no_more_than_has_passed(machine: _Machine) -> None:
    own = OwnTime()
    machine.passed_s, machine.cores_s = 10.0, 35.0
    assert own() == 10.0


def test_without_the_kernels_count_it_is_what_has_passed(machine: _Machine) -> None:
    own = OwnTime()
    machine.passed_s, machine.cores_s = 10.0, 2.0
    assert own() == 10.0


def test_sleeping_counts() -> None:
    passed, own = stopwatch(), OwnTime()
    time.sleep(0.05)
    assert passed() >= 0.04
    assert own() >= 0.04


@pytest.mark.parametrize(("own_s", "passed_s"), [(2.0, 2.0), (0.0, LONGEST)])
def test_a_run_ends_at_its_own_time_or_far_past_it(own_s: float, passed_s: float) -> None:
    done, ended = threading.Event(), threading.Event()

    def late(place: str | None) -> bool:
        ended.set()
        done.set()
        return False

    watch(time.monotonic() - passed_s, 1.0, done, late, own_s=lambda: own_s).join()
    assert ended.is_set()


def test_a_busy_machine_does_not_end_a_run() -> None:
    done, ended = threading.Event(), threading.Event()

    def late(place: str | None) -> bool:
        ended.set()
        return False

    began = time.monotonic() - 2.0
    thread = watch(began, 1.0, done, late, own_s=lambda: 0.5)
    time.sleep(0.5)
    done.set()
    thread.join()
    assert not ended.is_set()
