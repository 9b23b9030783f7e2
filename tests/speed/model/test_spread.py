"""The interval of a step, from the classes of kernels that it consists of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from trainfit.results.runs.steps import KINDS
from trainfit.speed.spread import StepSpread, spread_of
from trainfit.speed.work import COLUMNS, Work


def spread(*kernels: tuple[str, float, int, int], **options: Any) -> StepSpread:
    """Of kernels: kind, seconds, FLOPs, rows; ``launching_s`` come on top of them."""
    table = np.zeros((len(kernels), len(COLUMNS)), np.int64)
    for place, (kind, _, flops, rows) in enumerate(kernels):
        for name, value in (("kind", KINDS.index(kind)), ("flops", flops), ("rows", rows)):
            table[place, COLUMNS.index(name)] = value
    none = np.zeros(len(kernels), np.int64)
    seconds = np.array([each[1] for each in kernels])
    known: dict[str, Any] = {"core_measured": False, "calibrated": False, **options}
    step_s = float(seconds.sum()) + known.get("launching_s", 0.0)
    return spread_of(Work(table, none, none, none[:1]), seconds, step_s, **known)


LARGE, SMALL = ("matmul", 1.0, 10**11, 4096), ("matmul", 1.0, 10**8, 64)


def test_what_is_well_known_is_narrow_and_nothing_is_named() -> None:
    found = spread(LARGE)
    assert found.high < 1.14 and found.low == pytest.approx(1 / found.high)
    assert found.wide_for == ()


def test_small_kernels_are_known_less_and_named() -> None:
    found = spread(LARGE, SMALL, SMALL)
    assert found.high > spread(LARGE).high and found.wide_for == ("small matmuls",)


def test_independent_errors_of_two_classes_cancel_in_part() -> None:
    both = spread(LARGE, ("pointwise", 1.0, 0, 0))
    assert both.high < max(spread(LARGE).high, spread(("pointwise", 1.0, 0, 0)).high)


def test_an_operator_without_a_flop_rule_widens_the_interval_by_its_share_and_is_named() -> None:
    little, much = (spread(LARGE, ("unknown", each, 0, 0)) for each in (0.05, 1.0))
    assert little.high < 1.2 < 1.5 < much.high
    assert much.wide_for == ("operators without a FLOP rule",)


def test_a_step_that_waits_for_its_launches_is_as_wide_as_the_cpu_is_unknown() -> None:
    assumed = spread(LARGE, launching_s=9.0)
    assert assumed.wide_for == ("launches by the CPU",) and assumed.high > 1.3
    assert spread(LARGE, launching_s=9.0, core_measured=True).high < assumed.high


def test_a_cpu_that_may_be_the_limit_makes_the_step_longer_and_never_shorter() -> None:
    hidden, near = (spread(LARGE, host_s=each) for each in (0.1, 0.9))
    assert hidden == spread(LARGE) and near.low == hidden.low
    assert near.high == pytest.approx(0.9 * math.exp(0.5))


def test_a_measured_card_is_known_better() -> None:
    assert spread(LARGE, calibrated=True).high < spread(LARGE).high


def test_short_attention_is_known_less_than_long() -> None:
    short, long = (spread(("attention", 1.0, 10**10, rows)) for rows in (197, 4096))
    assert short.high > long.high and short.wide_for == ("short attention",)


def test_a_step_without_kernels_has_an_interval() -> None:
    assert spread().high >= 1.0
