"""The loader's model is the tests' own: what it gives for the same values is simulated once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from trainfit.loader.measure.fitting import Fitted

_predict = functools.cache(Fitted.predict)


@pytest.fixture(scope="session", autouse=True)
def each_is_simulated_once() -> Iterator[None]:
    """A prediction follows from frozen values, and most tests here search on the same ones."""

    def predict(fitted: Fitted, *args: Any, **named: Any) -> Any:
        return _predict(fitted, *args, **named)

    with mock.patch.object(Fitted, "predict", predict):
        yield
