"""A simulated device on which the trainings of a file run, and what is found of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import trainfit
from helpers_learning import Kinds, found_of
from trainfit.results.findings import Finding
from trainfit.simgpu.session import Simulation


@pytest.fixture(scope="module")
def simulation() -> Iterator[Simulation]:
    with trainfit.simulate("T4") as simulated:
        yield simulated


@pytest.fixture
def kinds(simulation: Simulation) -> Kinds:
    def of(training: Callable[[], Any]) -> dict[str, Finding]:
        return found_of(lambda _: training(), simulation)

    return of
