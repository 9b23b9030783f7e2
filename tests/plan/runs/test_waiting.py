"""Waits of the main thread, in which Ctrl-C may come at any moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from trainfit.plan.runs import tracing
from trainfit.plan.runs.processes import RamGate
from trainfit.plan.runs.runs import result_of


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Does something in a thread soon; from then on nothing may wait on a condition.

    KeyboardInterrupt within it can become "release unlocked lock": some 1 in 1,000 times.
    """

    def refused(*_: Any) -> bool:
        raise AssertionError("waits on a condition")

    def begin(do: Callable[[], None]) -> None:
        def run() -> None:
            time.sleep(0.1)
            do()

        threading.Thread(target=run, daemon=True).start()
        monkeypatch.setattr(threading.Condition, "wait", refused)

    return begin


Begin = Callable[[Callable[[], None]], None]


def test_a_run_is_awaited(begun: Begin) -> None:
    future: Future[Any] = Future()
    begun(lambda: future.set_result("a trace"))
    result: Any = result_of(future)
    assert result == "a trace"


class Running:
    """A process that ends after some looks."""

    looks = 0

    def poll(self) -> int | None:
        self.looks += 1
        return 3 if self.looks > 4 else None

    def end(self) -> None: ...


def test_a_process_is_awaited(begun: Begin, tmp_path: Path) -> None:
    begun(lambda: None)
    ended = tracing._wait(Running(), tmp_path / "none", 9, threading.Event(), lambda: None)
    assert ended == 3


def test_a_plan_that_has_stopped_awaits_no_process(tmp_path: Path) -> None:
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(tracing.Stopped):
        tracing._wait(Running(), tmp_path / "none", 9, stopped, lambda: None)


def test_a_turn_is_awaited(begun: Begin) -> None:
    gate = RamGate(lambda text: None, lambda: 1 << 30)
    gate.learn(1 << 30)  # one at a time
    order = []
    first = gate.turn(1)
    first.__enter__()

    def end() -> None:
        order.append("first ends")
        first.__exit__(None, None, None)

    begun(end)
    with gate.turn(2):
        order.append("second begins")
    assert order == ["first ends", "second begins"]
