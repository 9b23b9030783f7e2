"""A simulated device on which the trainings of a file run, and what is found of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import trainfit
from helpers_learning import Kinds, observing
from trainfit.findings.training.learning import of_learning
from trainfit.results.findings import Finding
from trainfit.simgpu.session import Simulation


@pytest.fixture(scope="module")
def simulation() -> Iterator[Simulation]:
    with trainfit.simulate("T4") as simulated:
        yield simulated


@pytest.fixture
def kinds(simulation: Simulation) -> Kinds:
    def of(training: Callable[[], Any]) -> dict[str, Finding]:
        with observing(simulation, counts_in_place=False) as observer:
            kept = training()
            found = {each.kind: each for each in of_learning(observer.facts())}
            del kept
        return found

    return of
