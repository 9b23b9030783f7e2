"""The simulated GPU that most of these tests run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import trainfit


@pytest.fixture
def sim() -> Iterator[trainfit.Simulation]:
    with trainfit.simulate("RTX 4090") as simulation:
        yield simulation
