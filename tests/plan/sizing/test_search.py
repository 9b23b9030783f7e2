"""The search by trial, on jobs whose memory is a known function of the batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from trainfit.plan.runs.failures import NotSimulated, ScriptError
from trainfit.plan.runs.progress import Notes
from trainfit.plan.runs.runs import Runs
from trainfit.plan.runs.tracing import Trace
from trainfit.plan.sizing.attempts import (
    MOST_TRIALS,
    Attempts,
    Found,
    SimulatedBatch,
    found_by,
    reach_of,
    search,
)
from trainfit.results.runs.spec import AS_WRITTEN, RunSpec

CAPACITY, USABLE = 1_000_000, 900_000


def run(
    memory: Callable[[int], float],
    known: Sequence[int] = (8, 16),
    most: int = 1 << 20,
    fails: Callable[[int], bool] = lambda batch: False,
    unit: int = 1,
) -> tuple[Found, list[int]]:
    asked: list[int] = []

    def trial(batch: int) -> SimulatedBatch:
        need = int(memory(batch))
        return SimulatedBatch(batch, need, need <= CAPACITY, need <= USABLE)

    def measure(batches: Sequence[int]) -> list[SimulatedBatch]:
        asked.extend(batches)
        return [trial(batch) for batch in batches if not fails(batch)]

    found = search(
        map(trial, known),
        measure,
        free_bytes=CAPACITY,
        free_with_headroom_bytes=USABLE,
        most=most,
        unit=unit,
    )
    assert len(asked) <= MOST_TRIALS
    assert len(set(asked)) == len(asked)
    assert not set(asked) & set(known)
    assert all(1 <= batch <= most for batch in asked)
    return found, asked


@pytest.mark.parametrize(
    "memory",
    [
        lambda b: 50_000 + 10_000 * b,
        lambda b: 50_000 + 9_000 * b + 300 * (b * 7919 % 13),  # varies from batch to batch
        lambda b: 50_000 + 40 * b * b,
        lambda b: 50_000 + 20_000 * -(-b // 8) * 4,  # a staircase
    ],
    ids=["line", "noise", "square", "stairs"],
)
def test_the_found_batch_sizes_fit_and_are_near_the_limit(memory: Callable[[int], float]) -> None:
    found, _ = run(memory)
    best = max(b for b in range(1, 10_000) if memory(b) <= CAPACITY)
    assert found.largest is not None
    assert found.recommended is not None
    assert found.too_large is not None
    assert memory(found.largest) <= CAPACITY < memory(found.too_large)
    assert memory(found.recommended) <= USABLE
    assert 0.75 * best <= found.largest <= best < found.too_large
    assert {found.largest, found.recommended, found.too_large} <= set(found.tried)


def test_no_batch_fits() -> None:
    found, _ = run(lambda b: 2_000_000 + b)
    assert (found.largest, found.recommended) == (0, 0)


def test_only_a_smaller_batch_than_the_present_fits() -> None:
    found, _ = run(lambda b: 200_000 * b)
    assert (found.largest, found.recommended, found.too_large) == (5, 4, 6)


def test_the_data_set_bounds_the_search() -> None:
    found, asked = run(lambda b: 1000 + b, most=40)
    assert (found.largest, found.too_large) == (40, None)
    assert asked == [40]


def test_memory_that_does_not_grow() -> None:
    found, _ = run(lambda b: 1000)
    assert found.too_large is None
    assert found.largest == max(found.tried)


def test_trials_that_fail_are_left_out() -> None:
    found, _ = run(lambda b: 10_000 * b, fails=lambda batch: batch > 50)
    assert found.largest is not None
    assert found.largest <= 50


def test_below_those_that_fail_the_search_goes_on() -> None:
    """The first guess is far off and cannot be simulated."""
    found, asked = run(
        lambda b: 50_000 + 0.4 * b**3, known=(32, 40), fails=lambda batch: batch > 256
    )
    assert asked[0] > 256  # the line through two small ones
    assert found.largest is not None and found.recommended is not None
    assert 0.75 * 133 <= found.largest <= 133
    assert found.too_large is not None


def test_what_failed_is_not_said_to_be_too_large() -> None:
    found, _ = run(lambda b: 1000 + b, fails=lambda batch: batch > 50)
    assert found.too_large is None
    assert found.largest is not None and 40 <= found.largest <= 50


def test_a_jump_of_memory_does_not_make_trials_creep() -> None:
    """The line through 38 and 39 says that 40 is too large; it would go on so, one by one."""

    def trial(batch: int) -> SimulatedBatch:
        peak = 100 * batch + 3000 * (batch >= 39)
        return SimulatedBatch(batch, peak, peak <= 7000, peak <= 7000)

    found = search(
        [trial(38), trial(39)],
        lambda batches: map(trial, batches),
        free_bytes=7000,
        free_with_headroom_bytes=7000,
        most=1000,
    )
    assert (found.largest, found.too_large, found.tried) == (39, 41, (38, 39, 41))


# --- Without more trials --------------------------------------------------------------------------


def trial(batch: int, need: int) -> SimulatedBatch:
    return SimulatedBatch(batch, need, need <= CAPACITY, need <= USABLE)


def test_what_trials_tell_without_others() -> None:
    known = [trial(8, 100_000), trial(16, 200_000), trial(96, 950_000), trial(128, 1_200_000)]
    found = found_by(known)
    assert (found.largest, found.recommended, found.too_large) == (96, 16, 128)
    assert found_by(known[:2]).too_large is None


@pytest.mark.parametrize(
    ("known", "most", "reach"),
    [
        ([(8, 100_000), (16, 200_000)], 1000, 72),  # where their line meets the free memory
        ([(8, 100_000), (16, 100_100)], 1000, 128),  # no further than a search would try at once
        ([(8, 100_000), (16, 200_000)], 40, 40),
        ([(8, 100_000), (16, 200_000), (32, 950_000)], 1000, 30),  # below what was seen not to fit
        ([(8, 950_000)], 1000, 0),
    ],
)
def test_how_far_memory_seems_to_reach(known: list[tuple[int, int]], most: int, reach: int) -> None:
    assert reach_of([trial(*each) for each in known], USABLE, most) == reach


def test_sizes_that_processes_can_share_are_tried() -> None:
    found, asked = run(lambda batch: 1_000 * batch, known=(6, 12), unit=6)
    assert asked and not any(batch % 6 for batch in asked)
    assert found.recommended is not None and 850 <= found.recommended <= 900


class _Failing:
    """Runs of which none but the smallest succeeds."""

    def start(self, batch: int, spec: RunSpec) -> None:
        del batch, spec

    def trace(self, batch: int, spec: RunSpec) -> Trace:
        del spec
        raise NotSimulated if batch == 32 else ScriptError("AssertionError")


def test_sizes_that_fail_are_known_and_told_of_with_the_cause() -> None:
    notes = Notes()
    nothing: Any = None
    attempts = Attempts(cast(Runs, _Failing()), nothing, nothing, notes)
    assert not list(attempts.made([22, 16, 32], AS_WRITTEN))
    assert attempts.failed(AS_WRITTEN) == (16, 22)
    assert "batch size 16 could not be simulated: AssertionError" in notes
