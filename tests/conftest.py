"""Which tests run real loaders or time this machine, and where hypothesis' examples come from."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# The examples of `make test` are the same every time: what it says depends on the change alone.
# `make test-slow` tries others (profile "chance").
settings.register_profile("fixed", derandomize=True)
settings.register_profile("chance", derandomize=False)
settings.load_profile("fixed")

#: `make test` runs these modules after the others, one test at a time.
ALONE = {
    *("test_bench_launch", "test_bench_loader", "test_cli_loader", "test_loader_beyond"),
    "test_loader_child",
    *("test_loader_fault_checks", "test_loader_faults", "test_loader_machine", "test_rehearsal"),
    "test_loader_doubts",
    *("test_loader_split", "test_loader_storage", "test_loader_tuning", "test_this_cpu"),
    "test_versus_cpu",
    *("test_watch_sampler", "test_watch_sampler_processes"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them."""
    for item in items:
        if Path(item.path).stem in ALONE:
            item.add_marker("alone")
