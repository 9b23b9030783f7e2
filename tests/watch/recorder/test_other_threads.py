"""Looks at the Python threads next to the one that trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from trainfit.watch.recorder.looks import other_threads
from trainfit.watch.recorder.looks.other_threads import OtherThreadLooks


def waits_until(stop: threading.Event) -> None:
    stop.wait()


@pytest.fixture
def thread() -> Iterator[threading.Thread]:
    stop = threading.Event()
    found = threading.Thread(target=waits_until, args=(stop,))
    found.start()
    yield found
    stop.set()
    found.join()


def looked(monkeypatch: pytest.MonkeyPatch, thread: threading.Thread, rate: float) -> float:
    """The share of a core that a thread has that uses it at this rate, at the looks' own clock."""
    clock = {"now": 0.0}
    monkeypatch.setattr(
        other_threads, "cpu_s_of", lambda at: rate * clock["now"] if at == thread.native_id else 0.0
    )
    looks = OtherThreadLooks()
    for number in range(11):
        clock["now"] = float(number)
        looks.look(threading.get_ident(), 100.0 + clock["now"], number)
    # What is seen while no step ends is of none.
    for number in range(11, 40):
        clock["now"] = float(number)
        looks.look(threading.get_ident(), 100.0 + clock["now"], 11)
    found = looks.summary()
    at_lines = [line for line in found.code.lines if "test_other_threads.py" in line.place]
    assert sum(line.count for line in at_lines) == (10 if rate > 0.05 else 0)
    return found.cpu_share


def test_a_thread_that_computes_is_found_with_its_line(
    monkeypatch: pytest.MonkeyPatch, thread: threading.Thread
) -> None:
    assert looked(monkeypatch, thread, 0.4) == pytest.approx(0.4)


def test_a_thread_that_waits_is_none(
    monkeypatch: pytest.MonkeyPatch, thread: threading.Thread
) -> None:
    assert looked(monkeypatch, thread, 0.01) == 0.0


def test_the_kernel_tells_a_threads_time() -> None:
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    found = other_threads.cpu_s_of(threading.get_native_id())
    assert found is not None and found > 0.04
    assert other_threads.cpu_s_of(1 << 30) is None and other_threads.cpu_s_of(None) is None


def test_of_a_large_pool_all_are_looked_at_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    pool = [threading.Thread(target=waits_until, args=(stop,)) for _ in range(20)]
    for each in pool:
        each.start()
    own = {each.native_id for each in pool}
    clock = {"now": 0.0}
    monkeypatch.setattr(
        other_threads, "cpu_s_of", lambda at: 0.1 * clock["now"] if at in own else 0.0
    )
    looks = OtherThreadLooks()
    try:
        for number in range(60):
            clock["now"] = float(number)
            looks.look(threading.get_ident(), 100.0 + clock["now"], number)
    finally:
        stop.set()
        for each in pool:
            each.join()
    found = looks.summary()
    assert found.threads == 20 and found.cores == pytest.approx(2.0, rel=0.1)
