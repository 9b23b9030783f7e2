"""How long a thread waited for a core."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from trainfit.simgpu import cuda_clocks
from trainfit.simgpu.cuda_clocks import CoreWaitClock, KernelsCount, Remainder
from trainfit.simgpu.patching import PatchSet

needs_kernel = pytest.mark.skipif(not KernelsCount.is_there(), reason="the kernel does not count")
BOTH = [pytest.param(KernelsCount, marks=needs_kernel), Remainder]


@pytest.mark.parametrize("kind", BOTH)
def test_no_more_than_what_passed(kind: type[CoreWaitClock]) -> None:
    waits = kind()
    mark = waits.mark()
    sum(range(200_000))
    assert 0 <= waits.since(mark, 1e-9) <= 1e-9
    assert waits.since(mark, 0.0) == 0.0


@pytest.mark.parametrize("kind", BOTH)
def test_another_threads_mark_tells_nothing(kind: type[CoreWaitClock]) -> None:
    waits = kind()
    marks = []
    thread = threading.Thread(target=lambda: marks.append(waits.mark()))
    thread.start()
    thread.join()
    assert waits.since(marks[0], 5.0) == 0.0


@needs_kernel
def test_sleeping_is_no_waiting_for_a_core() -> None:
    waits = KernelsCount()
    mark, began = waits.mark(), time.perf_counter()
    time.sleep(0.05)
    passed = time.perf_counter() - began
    # However busy the machine is: it waits for a core after its sleep at most.
    assert waits.since(mark, passed) <= passed - 0.05 + 1e-3


def test_without_the_kernel_calls_that_wait_are_known_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wall, on_core = 100.0, 1.0

    def passes(seconds: float) -> None:
        nonlocal wall
        wall += seconds

    monkeypatch.setattr(time, "sleep", passes)
    monkeypatch.setattr(time, "thread_time", lambda: on_core)
    monkeypatch.setattr(cuda_clocks, "_monotonic", lambda: wall)
    waits, patches = Remainder(), PatchSet()
    waits.install(patches)
    mark = waits.mark()
    time.sleep(3.0)
    on_core += 0.5
    wall += 0.5 + 2.0  # held up for two seconds
    assert waits.since(mark, wall - 100.0) == pytest.approx(2.0)
    patches.restore()
    time.sleep(4.0)  # nobody watches
    assert waits.since(mark, wall - 100.0) == pytest.approx(6.0)


@pytest.mark.parametrize("content", [None, "", "0 0 0\n", "1 2"])
def test_a_kernel_that_does_not_count_is_told(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "schedstat"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(cuda_clocks, "_SCHEDSTAT", file)
    assert not KernelsCount.is_there()
    assert isinstance(cuda_clocks.core_waits(), Remainder)
