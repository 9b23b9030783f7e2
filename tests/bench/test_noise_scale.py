"""Parts of the noise scale's bench."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


@pytest.fixture(scope="module")
def bench(bench_scripts: None) -> Any:
    return importlib.import_module("noise_scale")


def test_the_noise_scale_of_known_problems_is_found(bench: Any) -> None:
    details: dict[str, float] = {}
    error, coverage = bench.quadratic(10, details)
    assert error < 0.05 and coverage > 0.7
    assert len(details) == len(bench.RATIOS)
