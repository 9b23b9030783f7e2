"""What tests of benchmarks share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from helpers_cli import ROOT

BENCH = ROOT / "bench"


@pytest.fixture(scope="module")
def bench_scripts() -> Iterator[None]:
    """The scripts of ``bench`` import one another by name; after a module's tests none is left."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
            del sys.modules[name]
