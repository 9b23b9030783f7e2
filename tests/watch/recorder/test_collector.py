"""Pauses of Python's garbage collector: what is told of them, and that looking leaves no trace."""

from __future__ import annotations

import _thread
import contextlib
import functools
import gc
import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import trainfit
from trainfit.loader.measure.records import COLUMNS, time_fetches
from trainfit.results.runs.watched import COLLECTIONS
from trainfit.simgpu.patching import PatchSet
from trainfit.watch.recorder.looks.collector import CollectorPauses


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def patches() -> Iterator[PatchSet]:
    patches = PatchSet()
    yield patches
    patches.restore()


def test_pauses_are_added_up_and_told_at_most_once_a_second(patches: PatchSet) -> None:
    told: list[dict[str, Any]] = []
    clock = Clock()

    def tell(kind: str, **values: Any) -> None:
        told.append({"kind": kind, **values})

    pauses = CollectorPauses(tell, clock)
    called = callback_of(pauses, patches)

    def pause(seconds: float) -> None:
        called("start", {"generation": 2})
        clock.now += seconds
        called("stop", {"generation": 2})

    for seconds in (0.25, 0.5, 0.0001):  # the last one is none: new objects alone
        pause(seconds)
    pauses.look()
    assert not told
    clock.now += 1.0
    pauses.look()
    values = {"pauses": 2.0, "longest_s": pytest.approx(0.5)}
    assert told == [{"kind": COLLECTIONS, "seconds": pytest.approx(0.75), "values": values}]
    pauses.look(at_end=True)
    assert len(told) == 1  # nothing came since then
    clock.now += 1000.0  # of a long run events become fewer
    pause(0.1)
    pauses.look()
    clock.now += 2.0
    pause(0.1)
    pauses.look()
    assert len(told) == 2
    pauses.look(at_end=True)
    assert len(told) == 3


def callback_of(pauses: CollectorPauses, patches: PatchSet) -> Callable[..., None]:
    before = list(gc.callbacks)
    pauses.install(patches)
    (called,) = [each for each in gc.callbacks if each not in before]
    return called


def test_python_tells_of_a_real_collection_and_nothing_is_left(patches: PatchSet) -> None:
    told: list[float] = []
    pauses = CollectorPauses(lambda kind, seconds, values: told.append(seconds))
    callback_of(pauses, patches)
    kept = [[each] for each in range(300_000)]
    gc.collect()
    pauses.look(at_end=True)
    assert told and 0.001 < sum(told) < 60 and kept
    before = len(gc.callbacks)
    patches.restore()
    assert len(gc.callbacks) == before - 1


def _of_watch() -> Callable[[], None]:
    patches = PatchSet()
    CollectorPauses(lambda *_, **__: None).install(patches)
    return patches.restore


def _of_a_measured_worker() -> Callable[[], None]:
    return time_fetches(np.zeros((2, COLUMNS)))


def _of_a_simulation() -> Callable[[], None]:
    simulation = trainfit.simulate("RTX 4090")
    simulation.__enter__()
    return lambda: simulation.__exit__(None, None, None)


#: What has Python tell of its collections; each gives what ends it.
WATCHES = (_of_watch, _of_a_measured_worker, _of_a_simulation)


@contextlib.contextmanager
def added(watch: Callable[[], Callable[[], None]]) -> Iterator[Callable[..., None]]:
    """The callback that is added."""
    before = list(gc.callbacks)
    end = watch()
    try:
        (called,) = [each for each in gc.callbacks if each not in before]
        yield called
    finally:
        end()
    assert gc.callbacks == before


@pytest.mark.parametrize("watch", WATCHES)
def test_no_python_runs_in_a_collection(watch: Callable[[], Callable[[], None]]) -> None:
    """A Ctrl-C that comes meanwhile is raised in the script, and not dropped with what a callback
    raises."""
    codes: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            codes.append(frame.f_code.co_name)

    with added(watch) as called:
        sys.setprofile(profile)
        try:
            called("start", {})
            called("stop", {})
        finally:
            sys.setprofile(None)
    assert not codes


def test_an_interrupt_during_a_collection_reaches_the_script(patches: PatchSet) -> None:
    every = map(_thread.interrupt_main, itertools.repeat(signal.SIGINT))
    interrupts = type("Interrupts", (), {"start": property(functools.partial(next, every))})()
    first = functools.partial(getattr, interrupts)
    gc.collect()  # what other tests have left may have finalizers in Python, which drop it as well
    # A shell's background job begins with SIGINT ignored, and has no handler that could raise;
    # Hypothesis has a callback in Python, which drops what is raised in it.
    former, others = signal.signal(signal.SIGINT, signal.default_int_handler), gc.callbacks[:]
    gc.callbacks[:] = [first]
    try:
        callback_of(CollectorPauses(lambda *_, **__: None), patches)
        with pytest.raises(KeyboardInterrupt):
            gc.collect()
    finally:
        patches.restore()
        gc.callbacks[:] = others
        signal.signal(signal.SIGINT, former)


def test_a_script_may_empty_the_list_of_callbacks(
    patches: PatchSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "callbacks", [])
    callback_of(CollectorPauses(lambda *_, **__: None), patches)
    gc.callbacks.clear()
    patches.restore()
