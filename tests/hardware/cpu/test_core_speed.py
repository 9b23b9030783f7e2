"""The cores' speed from moment to moment: from pieces of work that a sampler notes down."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.hardware.machine.core_speed import CoreSpeeds, WorkPieces

EVERY_S = 0.05
FULL_NS = 50_000.0


def pieces(speeds: list[np.ndarray], busy: list[float], full: float = FULL_NS) -> WorkPieces:
    """One piece a core each 50 ms: a core's speeds, and the share in which it is busy."""
    rows = []
    for core, each in enumerate(speeds):
        at = 100 + EVERY_S * np.arange(len(each)) + 0.001 * core
        idle = (1 - busy[core]) * (at - 100)
        rows.append(np.stack([at, np.full(len(each), float(core)), full / each, idle], 1))
    table = np.concatenate(rows)
    table = table[np.argsort(table[:, 0])]
    return WorkPieces(table[:, 0], table[:, 1], table[:, 2], table[:, 3])


def halves(slow: float) -> np.ndarray:
    """Ten seconds at full speed and ten at another."""
    return np.repeat([1.0, slow], 200)


def test_a_slowed_span_is_seen_and_the_other_is_not() -> None:
    seen = pieces([halves(0.6), halves(1.0)], [1.0, 1.0])
    first, second = seen.speeds([(100.0, 109.9), (110.1, 120.0)])
    assert first is not None and second is not None
    assert first.speed == pytest.approx(1.0)
    assert second.speed == pytest.approx(0.8, abs=0.01)
    assert second.busy_cores == pytest.approx(2.0, abs=0.05)


def test_a_core_that_idles_may_be_slow() -> None:
    seen = pieces([halves(1.0), halves(0.5)], [1.0, 0.0])
    _, second = seen.speeds([(100.0, 109.9), (110.1, 120.0)])
    assert second is not None
    assert second.speed == pytest.approx(1.0, abs=0.01)
    assert second.busy_cores == pytest.approx(1.0, abs=0.05)


def test_a_processor_that_clocks_lower_with_all_cores_busy_is_at_full_speed() -> None:
    """Ten seconds with one core busy, ten with both, which is slower for both."""
    one = pieces([halves(0.8), halves(0.8)], [1.0, 0.0])
    idle = one.idle.copy()
    second = (one.core == 1) & (one.at > 110)
    idle[second] = idle[second][0]  # from then on it works
    seen = WorkPieces(one.at, one.core, one.took, idle)
    alone, both = seen.speeds([(100.0, 109.9), (110.1, 120.0)])
    assert alone is not None and both is not None
    assert (alone.busy_cores, both.busy_cores) == pytest.approx((1.0, 2.0), abs=0.05)
    assert (alone.speed, both.speed) == pytest.approx((1.0, 1.0), abs=0.01)


def test_spans_that_are_slow_all_along_are_told_by_the_others() -> None:
    """With both cores busy never fast; with one busy now fast, now slow: it is from outside."""
    at_work = np.where(np.arange(400) < 200, np.where(np.arange(400) % 2, 1.0, 0.6), 0.6)
    one = pieces([at_work, at_work], [1.0, 0.0])
    idle = one.idle.copy()
    second = (one.core == 1) & (one.at > 110)
    idle[second] = idle[second][0]
    seen = WorkPieces(one.at, one.core, one.took, idle)
    _, both = seen.speeds([(100.0, 109.9), (110.1, 120.0)])
    # The first core was seen fast while it worked; of the second nobody knows.
    assert both is not None
    assert both.speed == pytest.approx((0.6 + 1.0) / 2, abs=0.01)


def test_too_little_seen_is_no_speed() -> None:
    few = pieces([np.ones(10)], [1.0])
    assert few.speeds([(100.0, 101.0)]) == [None]
    enough = pieces([np.ones(100)], [1.0])
    assert enough.speeds([(100.0, 100.07), (300.0, 301.0)]) == [None, None]
    assert enough.speeds([]) == []


@given(
    speed=st.floats(0.2, 1.0),
    full=st.floats(1e3, 1e7),
    share=st.floats(0.2, 0.8),
    busy=st.floats(0.0, 1.0),
)
def test_only_ratios_of_times_count(speed: float, full: float, share: float, busy: float) -> None:
    changes = np.where(np.arange(400) % 20 < 20 * share, 1.0, speed)
    found = [
        pieces([changes, np.ones(400)], [busy, busy], size).speeds([(100.0, 121.0)])[0]
        for size in (full, 10 * full)
    ]
    assert found[0] is not None and found[1] is not None
    assert found[0].speed == pytest.approx(found[1].speed)
    assert speed / 2 <= found[0].speed <= 1.0


def test_the_sampler_watches_and_ends_with_the_context() -> None:
    with CoreSpeeds() as watch:
        process = watch._process
        assert process is not None
        end = time.monotonic() + 300
        while len(watch.pieces().at) < 8 and time.monotonic() < end:
            time.sleep(0.05)
        seen = watch.pieces()
    assert process.poll() is not None
    assert set(seen.core) <= set(os.sched_getaffinity(0))
    assert (seen.took > 0).all() and (np.diff(seen.at) >= 0).all()


def test_without_affinities_there_is_nothing_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    with CoreSpeeds() as watch:
        assert len(watch.pieces().at) == 0
        assert watch.pieces().speeds([(0.0, 1e9)]) == [None]
