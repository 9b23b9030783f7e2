"""Families of cases: some of each in ``make test``, all of them in ``make test-slow``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_of(cases: Iterable[Any], quick: int) -> list[Any]:
    """All ``cases`` of a family that goes one path; so many, evenly spread, are not ``slow``."""
    given = list(cases)
    chosen = {number * len(given) // quick for number in range(quick)}
    return [each if i in chosen else _slow(each) for i, each in enumerate(given)]


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """All ``cases``, of which those in ``quick`` are not ``slow``."""
    given = list(cases)
    assert all(each in given for each in quick), "a case that there is not"
    return [each if each in quick else _slow(each) for each in given]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
