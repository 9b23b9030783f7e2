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

HERE = Path(__file__).parent

#: `make test` runs these modules after the others, one test at a time.
ALONE = {
    "bench/test_launch.py",
    "bench/test_loader.py",
    "cli/test_loader.py",
    "loader/advice/test_doubts.py",
    "loader/advice/test_other_changes.py",
    "loader/faults/test_diagnose.py",
    "loader/faults/test_preflight.py",
    "loader/profile/test_batch_profile.py",
    "loader/profile/test_storage_cost.py",
    "loader/rehearsal/test_rehearsal.py",
    "loader/test_child.py",
    "loader/tune/test_machine.py",
    "loader/tune/test_tuning.py",
    "plan/real_machine/test_this_cpu.py",
    "plan/real_machine/test_versus_cpu.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them."""
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.relative_to(HERE).as_posix() in ALONE:
            item.add_marker("alone")
