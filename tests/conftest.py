"""Where hypothesis' examples come from, and where tests that run alone lie."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# The examples of `make test` are the same every time: what it says depends on the change alone.
# `make test-slow` tries others (profile "chance").
settings.register_profile("fixed", derandomize=True)
settings.register_profile("chance", derandomize=False)
settings.load_profile("fixed")

HERE = Path(__file__).parent
#: As in the Makefile.
ALONE = (HERE / "loader", HERE / "watch")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` looks for tests that run alone in two folders, so that it need not import all."""
    for item in items:
        if item.get_closest_marker("alone") and not any(map(item.path.is_relative_to, ALONE)):
            raise pytest.UsageError(
                f"{item.nodeid}: tests marked alone belong in tests/loader or tests/watch"
            )
