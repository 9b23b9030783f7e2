"""Looks at the main thread before the first step."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from trainfit.watch.recorder.looks import start
from trainfit.watch.recorder.looks.other_threads import cpu_s_of
from trainfit.watch.recorder.looks.start import StartLooks

CPU_IS_COUNTED = cpu_s_of(threading.get_native_id()) is not None


def computes(seconds: float) -> int:
    until, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        rounds += 1
    return rounds


def told(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[], object], *, trains: bool = True
) -> tuple[StartLooks, list[tuple[float, str]]]:
    """Looks while something is done, and the standstills that were told."""
    monkeypatch.setattr(start, "START_LOOK_S", 0.02)
    monkeypatch.setattr(start, "_STANDS_S", 0.3)
    found: list[tuple[float, str]] = []
    looks = StartLooks(lambda: False, lambda: trains, lambda *each: found.append(each[:2]))
    looks.start()
    work()
    looks.stop()
    return looks, found


def test_the_line_that_the_start_goes_to_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, stands = told(monkeypatch, lambda: computes(0.5))
    most = max(looks.summary().lines, key=lambda each: each.count)
    assert most.place.rpartition(":")[0].endswith("test_start_looks.py")
    assert most.function == "computes" and most.count > 5
    assert not stands  # it is at work


def test_a_process_that_trains_and_waits_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    _, stands = told(monkeypatch, lambda: time.sleep(0.8))
    assert stands and stands[0][0] >= 0.3
    assert "test_start_looks.py" in stands[0][1]


def test_of_a_process_that_may_not_train_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher, which waits for what it has started."""
    assert not told(monkeypatch, lambda: time.sleep(0.8), trains=False)[1]


def test_what_calls_the_training_is_no_caller_of_the_start() -> None:
    over: list[bool] = []
    looks = StartLooks(lambda: bool(over), lambda: True, lambda *_: None)

    def main() -> None:
        computes(0.4)
        over.append(True)
        computes(0.3)

    looks.start()
    main()
    most = max(looks.summary().lines, key=lambda each: each.count)
    assert most.function == "computes" and len(most.callers) == 1  # in main


def test_it_ends_with_the_first_step() -> None:
    looks = StartLooks(lambda: True, lambda: True, lambda *_: None)
    looks.start()
    computes(0.3)
    assert looks.summary().looks == 0


#: The main thread waits for the first batch.
WAITS = ("train.py:9", (), "", "first batch", "", "", "<module>")


@pytest.mark.parametrize(
    ("busy", "hangs", "first"),
    [(0.0, True, 10), (0.5, True, 60), (0.0, False, 60)],
    ids=["workers without CPU time", "workers that compute", "workers that do not hang"],
)
def test_workers_that_hang_in_the_first_batch_are_told_before_the_minute(
    monkeypatch: pytest.MonkeyPatch, busy: float, hangs: bool, first: int
) -> None:
    now = 0.0
    monkeypatch.setattr(start, "_cpu_s", lambda pid=0: busy * now if pid else 0.0)
    monkeypatch.setattr(start, "stacks_of_script", lambda _: [])
    found: list[tuple[float, str, bool]] = []
    stacks = {7: "in worker 0", 8: "in worker 1"} if hangs else {}
    looks = StartLooks(lambda: False, lambda: True, lambda *e: found.append(e), lambda: stacks)
    for second in range(130):
        now = float(second)
        looks._look_for_standstill(now, WAITS, ())
    assert found[0][0] == first
    assert len(found) <= 4  # it is told again after twice as long
    assert all(workers is (first == 10) for _, _, workers in found)
    assert ("in worker 1" in found[0][1]) is hangs


def test_a_line_that_is_no_wait_for_a_batch_has_its_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_cpu_s", lambda pid=0: 0.0)
    found: list[float] = []
    looks = StartLooks(lambda: False, lambda: True, lambda *e: found.append(e[0]), lambda: {7: "x"})
    for second in range(100):
        looks._look_for_standstill(float(second), (*WAITS[:3], "", *WAITS[4:]), ())
    assert found == [60.0]


@pytest.mark.skipif(not CPU_IS_COUNTED, reason="this kernel does not count it")
def test_the_cpu_time_of_another_process_is_known() -> None:
    code = "import time; t = time.thread_time()\nwhile time.thread_time() < t + 0.2: pass\nprint()"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdout.readline()
        spent = start._cpu_s(child.pid)
        child.communicate(b"\n")
    assert 0.2 <= spent < 60
    assert start._cpu_s() >= 0 and start._cpu_s(child.pid) == math.inf  # it is gone
