"""Looks at the main thread before the first step."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from trainfit.watch.recorder.looks import start
from trainfit.watch.recorder.looks.start import StartLooks


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
    looks = StartLooks(lambda: False, lambda: trains, lambda *each: found.append(each))
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
