"""Whose line of code a block of memory is attributed to."""

from __future__ import annotations

from trainfit.memory.snapshot_file import SnapshotFrame
from trainfit.memory.snapshot_history import origin


def test_the_hooks_of_watch_are_nobodys_place() -> None:
    """`watch --memory-history` on an H200 named torch_private/modules.py as the first place."""
    stack = (
        SnapshotFrame(
            "forward", "/usr/lib/python3.12/site-packages/torch/nn/modules/linear.py", 125
        ),
        SnapshotFrame(
            "_call_impl", "/usr/lib/python3.12/site-packages/torch/nn/modules/module.py", 1790
        ),
        SnapshotFrame("__call__", "/home/x/trainfit/src/trainfit/torch_private/modules.py", 74),
        SnapshotFrame("outermost", "/home/x/trainfit/src/trainfit/watch/recorder/job.py", 9),
        SnapshotFrame("<module>", "/home/x/job/leak.py", 8),
    )
    assert origin(stack, True).line == "job/leak.py:8"
    assert origin(stack, True).user_line == "job/leak.py:8"
