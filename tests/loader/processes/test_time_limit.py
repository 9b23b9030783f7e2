"""The time limit of a call in a fork: what others' programs take of the cores does not count."""

from __future__ import annotations

import functools
import os
import time

import pytest

from trainfit.loader.measure import processes


def _sleeps(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


def test_seconds_without_a_core_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of a DataLoader on a busy machine is no hang, and says what it found."""
    monkeypatch.setattr(processes, "_without_core_s", lambda pid: 1e6)
    monkeypatch.setattr(processes, "LONGEST", 1000.0)
    done = processes.call(functools.partial(_sleeps, 0.3), 0.1)
    assert done.value == "done" and not done.hung


def test_there_is_an_end_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_without_core_s", lambda pid: 1e6)
    monkeypatch.setattr(processes, "LONGEST", 2.0)
    assert processes.call(functools.partial(_sleeps, 600.0), 0.1).hung


def test_what_waits_for_no_core_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_without_core_s", lambda pid: 0.0)
    monkeypatch.setattr(processes, "LONGEST", 1000.0)
    assert processes.call(functools.partial(_sleeps, 600.0), 0.1).hung


def test_the_kernels_count_is_read() -> None:
    assert processes._without_core_s(os.getpid()) >= 0.0
    assert processes._without_core_s(2**22 + 1) == 0.0  # no such process


@pytest.mark.parametrize(("own_s", "longest", "hangs"), [(0.0, 1000.0, False), (1e6, 1000.0, True)])
def test_in_this_process_likewise(
    own_s: float, longest: float, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "OwnTime", lambda: lambda: own_s)
    monkeypatch.setattr(processes, "LONGEST", longest)
    done = processes.call_here(functools.partial(_sleeps, 600.0 if hangs else 0.3), 0.1)
    assert done.hung == hangs and (done.value == "done") != hangs
