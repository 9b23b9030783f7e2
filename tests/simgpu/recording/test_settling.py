"""Has memory settled? The judgement on made-up steps, and what steps take, by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trainfit.results.runs.recording import FREE, MALLOC, STEP_END
from trainfit.simgpu.device.settling import (
    MOST_STEPS,
    CourseFinding,
    StepUse,
    enough_steps,
    judge,
    step_uses,
)

SIZES = st.integers(1, 1 << 40).map(lambda size: size * 512)
STEP = st.builds(StepUse, SIZES, SIZES, SIZES, st.integers(1, 10_000))


def ends(*values: int) -> list[StepUse]:
    """Steps that differ in what they leave behind (and so in their peaks)."""
    return [StepUse(value + 4096, value, 4096, 3) for value in values]


def test_what_steps_take() -> None:
    """Two steps: 600 bytes stay, 100 are freed in between; then 1,000 come, 600 go."""
    events = [
        *(0 * 4 + MALLOC, 1 * 4 + MALLOC, 1 * 4 + FREE, 0 * 4 + STEP_END),
        *(2 * 4 + MALLOC, 0 * 4 + FREE, 1 * 4 + STEP_END),
        3 * 4 + MALLOC,  # of a step that is not whole
    ]
    uses = step_uses(np.array(events), np.array([600, 100, 1000, 1 << 20]))
    assert uses == [
        StepUse(peak_bytes=1024 + 512, end_bytes=1024, allocated_bytes=1536, allocations=2),
        StepUse(peak_bytes=1024 + 1024, end_bytes=1024, allocated_bytes=1024, allocations=1),
    ]
    assert step_uses(np.array(events[:3]), np.array([600, 100])) == []


@given(first=STEP, steady=STEP, count=st.integers(2, 20))
def test_equal_steps_have_settled(first: StepUse, steady: StepUse, count: int) -> None:
    assert judge([first] + [steady] * count) == CourseFinding("settled", first=2, period=1)


@given(first=STEP, cycle=st.lists(STEP, min_size=2, max_size=5), rest=st.integers(0, 5))
def test_a_repeated_cycle_has_settled(first: StepUse, cycle: list[StepUse], rest: int) -> None:
    assume(len(set(cycle)) == len(cycle))
    times = 2 if len(cycle) > 1 else 4
    steps = [first, *cycle * times, *cycle[:rest]]
    assert judge(steps) == CourseFinding("settled", first=2, period=len(cycle))


@given(first=STEP, warm=st.lists(STEP, min_size=1, max_size=6, unique=True), steady=STEP)
def test_late_settling_takes_more_evidence(
    first: StepUse, warm: list[StepUse], steady: StepUse
) -> None:
    assume(steady.end_bytes not in {use.end_bytes for use in warm})
    settled = judge([first, *warm, *[steady] * 4])
    assert (settled.course, settled.first, settled.period) == ("settled", len(warm) + 2, 1)
    assert judge([first, *warm, *[steady] * 2]).course != "settled"


@given(start=SIZES, growth=SIZES, count=st.integers(6, 30))
def test_equal_growth_is_measured_exactly(start: int, growth: int, count: int) -> None:
    uses = ends(7 * 512, *(start + growth * step for step in range(count - 1)))
    assert judge(uses) == CourseFinding("growing", growth_bytes=growth)


@given(start=SIZES, growths=st.lists(SIZES, min_size=5, max_size=20))
def test_uneven_growth_is_measured_on_average(start: int, growths: list[int]) -> None:
    uses = ends(512, *itertools.accumulate(growths, initial=start))
    judgement = judge(uses)
    assert judgement.course == "growing"
    if len(set(growths[-4:])) > 1:
        assert judgement.growth_bytes == round(sum(growths) / len(growths))


def test_fewer_steps_of_several_passes_see_as_many_batches() -> None:
    assert [enough_steps(12, passes) for passes in (0, 1, 4)] == [12, 12, 7]
    assert enough_steps(3, 4) == 3
    grown = ends(*itertools.accumulate(512 * step**2 for step in range(1, 8)))
    assert judge(grown).course == "growing" and judge(grown[:-1]).course == "irregular"


@given(values=st.lists(SIZES, min_size=5, max_size=MOST_STEPS, unique=True))
def test_what_shrinks_at_the_end_does_not_grow(values: list[int]) -> None:
    rising = sorted(values)
    falling = judge(ends(512, *rising[1:], rising[0]))
    assert falling.course == "irregular"


@given(steps=st.lists(STEP, max_size=MOST_STEPS))
def test_no_judgement_claims_what_was_not_seen(steps: list[StepUse]) -> None:
    judgement = judge(steps)
    if len(steps) < 3:
        assert judgement == CourseFinding("unknown")
    if judgement.course == "settled":
        assert judgement.first is not None and judgement.period is not None
        seen = steps[judgement.first - 1 :]
        assert len(seen) >= 2 * judgement.period
        for one, two in zip(seen, seen[judgement.period :], strict=False):
            assert one.end_bytes == two.end_bytes
    if judgement.course == "growing":
        assert judgement.growth_bytes is not None and judgement.growth_bytes > 0
        assert steps[-1].end_bytes > steps[1].end_bytes


@pytest.mark.parametrize(
    ("values", "course"),
    [
        ([9, 1, 2], "unknown"),
        ([9, 1, 2, 3], "irregular"),
        ([9, 1, 2, 3, 4], "irregular"),  # a few growths may be a queue that fills
        ([9, 1, 2, 3, 3, 3, 3], "settled"),
        ([9, 5, 1, 4, 2, 6, 3, 8, 7], "irregular"),
        ([9, 1, 2, 2], "irregular"),  # two shapes that take turns at random
        ([9, 1, 2, 4, 7, 8, 12, 12, 12], "irregular"),  # the growth has ended
    ],
)
def test_courses_by_hand(values: list[int], course: str) -> None:
    assert judge(ends(*values)).course == course


def test_a_part_that_grows_counts_where_the_whole_varies() -> None:
    whole = ends(9, 50, 10, 60, 20, 40, 30, 55)
    assert judge(whole).course == "irregular"
    parts = [[0, 1, 2, 3, 4, 5, 6], [50, 9, 58, 17, 36, 25, 49]]
    assert judge(whole, parts) == CourseFinding("growing", growth_bytes=1)


def test_the_second_steps_peak_stands_on_what_the_first_left() -> None:
    """ACT keeps a norm from one step to the next, from the second step on."""
    work = {"end_bytes": 1024, "allocated_bytes": 4096, "allocations": 5}
    uses = [StepUse(900, 512, 8192, 9), StepUse(2048, **work), StepUse(2560, **work)]
    assert judge(uses).course == "settled"
    assert judge([*uses, StepUse(3072, **work)]).course == "irregular"
